/* What a test asks of the stand-in: settings, faults, forged completions, counts. */
#include "fake.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_world fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

#define FAULTS 8

static struct fault {
    char call[32], detail[32];
    int error;
    int after; /* calls that still succeed */
    int times; /* how often it fails then; 0: always */
} faults[FAULTS];
static int fault_count;

static const struct {
    const char *name;
    int value;
} errors[] = {{"ENOMEM", ENOMEM}, {"EINVAL", EINVAL}, {"EIO", EIO}, {"ETIMEDOUT", ETIMEDOUT}, {"ENODEV", ENODEV}, {"EPERM", EPERM},
              {"EAGAIN", EAGAIN}, {"ENOSYS", ENOSYS}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EFAULT", EFAULT}, {"EACCES", EACCES}};

static int error_of(const char *name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (strcmp(errors[i].name, name) == 0) {
            return errors[i].value;
        }
    }
    return 0;
}

int fake_failure(const char *call, const char *detail)
{
    for (int i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->call, call) != 0 || (*fault->detail && (!detail || strcmp(fault->detail, detail) != 0))) {
            continue;
        }
        if (fault->after > 0) {
            fault->after--;
        } else if (fault->times != -1) {
            if (fault->times > 0 && --fault->times == 0) {
                fault->times = -1;
            }
            return fault->error;
        }
    }
    return 0;
}

/* "modify_qp:RTR:ETIMEDOUT", "reg_mr:ENOMEM"; after so many calls that work, so many times (0: ever after). */
int fake_fault(const char *text, int after, int times)
{
    char copy[96], *parts[3] = {NULL, NULL, NULL}, *save = NULL;
    int n = 0;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *part = strtok_r(copy, ":", &save); part && n < 3; part = strtok_r(NULL, ":", &save)) {
        parts[n++] = part;
    }
    if (n < 2 || fault_count == FAULTS || !error_of(parts[n - 1])) {
        return -1;
    }
    pthread_mutex_lock(&fake.lock);
    struct fault *fault = &faults[fault_count++];
    memset(fault, 0, sizeof *fault);
    snprintf(fault->call, sizeof fault->call, "%s", parts[0]);
    snprintf(fault->detail, sizeof fault->detail, "%s", n == 3 ? parts[1] : "");
    fault->error = error_of(parts[n - 1]);
    fault->after = after;
    fault->times = times;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

static const struct {
    const char *name;
    long *value;
} numbers[] = {
    {"devices", &fake.s_devices},       {"budget", &fake.s_budget},     {"port_state", &fake.s_port_state},
    {"max_inline", &fake.s_max_inline}, {"stall", &fake.s_stall},       {"queue_cost", &fake.s_queue_cost},
    {"contexts", &fake.n_contexts},     {"pds", &fake.n_pds},           {"mrs", &fake.n_mrs},
    {"cqs", &fake.n_cqs},               {"channels", &fake.n_channels}, {"qps", &fake.n_qps},
    {"pinned", &fake.pinned},           {"misuse", &fake.misuse},       {"most_in_flight", &fake.most_in_flight},
    {"polls", &fake.polls},             {"arms", &fake.arms},         {"hold", &fake.s_hold},
    {"inside", &fake.inside},
};

void fake_linger(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.inside++;
    while (fake.s_hold) {
        pthread_mutex_unlock(&fake.lock);
        usleep(1000);
        pthread_mutex_lock(&fake.lock);
    }
    fake.inside--;
    pthread_mutex_unlock(&fake.lock);
}

static long *number(const char *name)
{
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strcmp(numbers[i].name, name) == 0) {
            return numbers[i].value;
        }
    }
    return NULL;
}

long fake_get(const char *name)
{
    pthread_mutex_lock(&fake.lock);
    long *value = number(name), found = value ? *value : -1;
    pthread_mutex_unlock(&fake.lock);
    return found;
}

int fake_set(const char *name, long to)
{
    pthread_mutex_lock(&fake.lock);
    long *value = number(name);
    if (value) {
        *value = to;
        fake_move(); /* a stall may be over */
    }
    pthread_mutex_unlock(&fake.lock);
    return value ? 0 : -1;
}

int fake_gid(int index, const uint8_t *raw, int type)
{
    if (index < 0 || index >= FAKE_GIDS) {
        return -1;
    }
    pthread_mutex_lock(&fake.lock);
    memcpy(fake.gids[index].raw, raw, 16);
    fake.gids[index].type = type;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

/* A completion that nothing caused; it uses up the receive that is next, if it has this id. */
int fake_forge(uint32_t number, int receiving, uint64_t id, int status, uint32_t nbytes)
{
    pthread_mutex_lock(&fake.lock);
    struct fake_qp *pair = fake_pair(number);
    if (pair) {
        struct ibv_cq *queue = receiving ? pair->base.recv_cq : pair->base.send_cq;
        if (receiving && pair->held_receives && pair->receives[pair->first_receive].id == id) {
            pair->first_receive = (pair->first_receive + 1) % FAKE_QUEUE;
            pair->held_receives--;
        }
        fake_complete((struct fake_cq *)queue, pair, id, status, receiving ? IBV_WC_RECV : IBV_WC_SEND, nbytes);
    }
    pthread_mutex_unlock(&fake.lock);
    return pair ? 0 : -1;
}

/* Breaks a queue pair as a dead link does: the first SEND in flight, if any, ends with this status, all else is flushed. */
int fake_fail_pair(uint32_t number, int status)
{
    pthread_mutex_lock(&fake.lock);
    struct fake_qp *pair = fake_pair(number);
    if (pair) {
        fake_break(pair, status);
    }
    pthread_mutex_unlock(&fake.lock);
    return pair ? 0 : -1;
}

/* An event of every opened device. */
int fake_event(int type)
{
    int n = 0;
    pthread_mutex_lock(&fake.lock);
    for (struct fake_context *context = fake.contexts; context; context = context->next) {
        struct ibv_async_event event;
        memset(&event, 0, sizeof event);
        event.event_type = (enum ibv_event_type)type;
        n += write(context->events, &event, sizeof event) == sizeof event;
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}

int fake_path(const char *path)
{
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < FAKE_DEVICES; i++) {
        snprintf(fake.devices[i].ibdev_path, sizeof fake.devices[i].ibdev_path, "%s", path);
    }
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

/* Settings and faults as at the start; open handles stay. */
void fake_reset(void)
{
    static const uint8_t link_local[16] = {0xfe, 0x80, [15] = 1};
    static const uint8_t loopback[16] = {[10] = 0xff, 0xff, 127, 0, 0, 1};
    static const uint8_t loopback6[16] = {[15] = 1};
    pthread_mutex_lock(&fake.lock);
    fault_count = 0;
    fake.s_devices = 1;
    fake.s_budget = -1;
    fake.s_port_state = IBV_PORT_ACTIVE;
    fake.s_max_inline = 256;
    fake.s_stall = 0;
    fake.s_queue_cost = 0;
    fake.s_hold = 0;
    fake.misuse = 0;
    fake.most_in_flight = 0;
    memset(fake.gids, 0, sizeof fake.gids);
    memcpy(fake.gids[0].raw, link_local, 16);
    memcpy(fake.gids[1].raw, loopback, 16);
    memcpy(fake.gids[2].raw, loopback, 16);
    memcpy(fake.gids[4].raw, loopback6, 16);
    fake.gids[0].type = fake.gids[2].type = fake.gids[4].type = IBV_GID_TYPE_ROCE_V2;
    fake.gids[1].type = IBV_GID_TYPE_ROCE_V1;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        memset(&fake.devices[i], 0, sizeof fake.devices[i]);
        snprintf(fake.devices[i].name, sizeof fake.devices[i].name, "fake%d", i);
        snprintf(fake.devices[i].ibdev_path, sizeof fake.devices[i].ibdev_path, "/nonexistent/fake%d", i);
        fake.devices[i].node_type = IBV_NODE_CA;
        fake.devices[i].transport_type = IBV_TRANSPORT_IB;
    }
    pthread_mutex_unlock(&fake.lock);
}

__attribute__((constructor)) static void begin(void)
{
    fake_reset();
    /* For processes that no test can reach into. */
    const char *budget = getenv("FAKE_VERBS_BUDGET"), *fault = getenv("FAKE_VERBS_FAULT");
    const char *begun = getenv("FAKE_VERBS_BEGUN");
    if (budget) {
        fake.s_budget = atol(budget);
    }
    if (begun && write(atoi(begun), "x", 1) == 1) { /* a library that takes long to load */
        usleep(500000);
    }
    if (fault && fake_fault(fault, 0, 0)) {
        fprintf(stderr, "the stand-in libibverbs does not know the fault %s\n", fault);
        _exit(2);
    }
}
