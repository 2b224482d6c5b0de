#include "verbs/table.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verbs/verbs.h"

struct entry {
    const char *name;
    const char *version;
    size_t offset;
    int needed;
};

#define NEEDED(member) {"ibv_" #member, "IBVERBS_1.1", offsetof(struct ww_verbs, member), 1}

static const struct entry entries[] = {
    NEEDED(get_device_list),
    NEEDED(free_device_list),
    NEEDED(get_device_name),
    NEEDED(get_device_guid),
    NEEDED(open_device),
    NEEDED(close_device),
    NEEDED(query_device),
    NEEDED(query_port),
    NEEDED(query_gid),
    NEEDED(alloc_pd),
    NEEDED(dealloc_pd),
    NEEDED(reg_mr),
    NEEDED(dereg_mr),
    NEEDED(create_comp_channel),
    NEEDED(destroy_comp_channel),
    NEEDED(create_cq),
    NEEDED(destroy_cq),
    NEEDED(get_cq_event),
    NEEDED(ack_cq_events),
    NEEDED(create_qp),
    NEEDED(modify_qp),
    NEEDED(destroy_qp),
    NEEDED(get_async_event),
    NEEDED(ack_async_event),
    NEEDED(wc_status_str),
    {"_ibv_query_gid_ex", "IBVERBS_1.11", offsetof(struct ww_verbs, query_gid_ex), 0},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ww_verbs table;
static int opened;

/* A fork waits for the thread that opens the library, which its child has not got: nobody there would let go of the lock, or
 * end what was half done. But for a fork out of the library's own loading, which has the lock itself. */
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static _Thread_local int opening;

static void before_fork(void)
{
    if (!opening) {
        pthread_mutex_lock(&lock);
    }
}

static void after_fork(void)
{
    if (!opening) {
        pthread_mutex_unlock(&lock);
    }
}

static void prepare(void)
{
    (void)pthread_atfork(before_fork, after_fork, after_fork);
}

static void *look_up(void *library, const struct entry *entry)
{
#ifdef __GLIBC__
    /* By version first: the plain name may be an older ABI of the same function. */
    void *found = dlvsym(library, entry->name, entry->version);
    if (found) {
        return found;
    }
#endif
    return dlsym(library, entry->name);
}

static int fill(void *library, const char *path, char *why, size_t why_size)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        void *found = look_up(library, &entries[i]);
        if (!found && entries[i].needed) {
            snprintf(why, why_size, "%s has no %s", path, entries[i].name);
            return 0;
        }
        /* ISO C has no conversion between a pointer to an object and one to a function; POSIX gives both one form. */
        memcpy((char *)&table + entries[i].offset, &found, sizeof found);
    }
    return 1;
}

struct ww_status ww_verbs_open(const struct ww_verbs **verbs, char *why, size_t why_size)
{
    struct ww_status status = ww_status_of(WW_DONE, 0, "dlopen");
    pthread_once(&prepared, prepare);
    pthread_mutex_lock(&lock);
    if (!opened) {
        opening = 1;
        const char *path = getenv("WEIGHTWIRE_LIBIBVERBS");
        if (!path || !*path) {
            path = "libibverbs.so.1";
        }
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            const char *message = dlerror();
            snprintf(why, why_size, "%s", message ? message : path);
            status.code = WW_ABSENT;
        } else if (!fill(library, path, why, why_size)) {
            dlclose(library);
            status.code = WW_ABSENT;
        } else {
            opened = 1; /* and stays so: objects made by it may be anywhere */
        }
        opening = 0;
    }
    *verbs = status.code == WW_DONE ? &table : NULL;
    pthread_mutex_unlock(&lock);
    return status;
}
