/* What the drivers' checks are made of. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* Not assert(): it holds in every build, and errno is often the reason. */
#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(1); \
        } \
    } while (0)

#endif
