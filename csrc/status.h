/* The only way the core reports failure: what kind, which errno, in which call. */
#ifndef WW_STATUS_H
#define WW_STATUS_H

enum ww_code {
    WW_DONE = 0, /* everything asked for has happened */
    WW_PAUSED,   /* a signal came, or the slice of time is over: look around, then call again to go on */
    WW_TIMEOUT,  /* nothing moved for longer than allowed */
    WW_CLOSED,   /* the peer closed (error 0) or reset (its errno) the connection */
    WW_SHORT,    /* a file ended before the range did */
    WW_FAILED    /* the system refused: see error and operation */
};

struct ww_status {
    int code;              /* enum ww_code */
    int error;             /* an errno value, or 0 */
    const char *operation; /* the call it happened in: static text, never freed */
};

static inline struct ww_status ww_status_of(int code, int error, const char *operation)
{
    struct ww_status status;
    status.code = code;
    status.error = error;
    status.operation = operation;
    return status;
}

#endif
