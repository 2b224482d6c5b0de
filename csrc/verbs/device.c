#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verbs/table.h"
#include "verbs/verbs.h"

static struct ww_status failed(int error, const char *operation)
{
    return ww_status_of(WW_FAILED, error ? error : EIO, operation);
}

static struct ww_status list(const struct ww_verbs *verbs, struct ibv_device ***devices, int *count)
{
    *count = 0;
    errno = 0;
    *devices = verbs->get_device_list(count);
    if (!*devices && errno && errno != ENOSYS) {
        return failed(errno, "ibv_get_device_list");
    }
    /* ENOSYS, or no reason given: the kernel has no RDMA, which is to have no devices. */
    if (!*devices) {
        *count = 0;
    }
    return ww_status_of(WW_DONE, 0, "ibv_get_device_list");
}

struct ww_status ww_devices(const struct ww_verbs *verbs, struct ww_device_info *devices, int capacity, int *count)
{
    struct ibv_device **found;
    struct ww_status status = list(verbs, &found, count);
    if (status.code != WW_DONE || !found) {
        return status;
    }
    for (int i = 0; i < *count && i < capacity; i++) {
        memset(&devices[i], 0, sizeof devices[i]);
        snprintf(devices[i].name, sizeof devices[i].name, "%s", verbs->get_device_name(found[i]));
        snprintf(devices[i].path, sizeof devices[i].path, "%s", found[i]->ibdev_path);
        devices[i].guid = verbs->get_device_guid(found[i]);
        devices[i].transport = found[i]->transport_type;
    }
    verbs->free_device_list(found);
    return status;
}

/* A thread that looks for an event must not be caught in read(2). */
static int make_non_blocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? flags : fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

struct ww_status ww_context_open(const struct ww_verbs *verbs, const char *name, struct ibv_context **context)
{
    struct ibv_device **found;
    int count;
    struct ww_status status = list(verbs, &found, &count);
    *context = NULL;
    if (status.code != WW_DONE) {
        return status;
    }
    status = failed(ENODEV, "ibv_open_device");
    for (int i = 0; i < count; i++) {
        if (strcmp(verbs->get_device_name(found[i]), name) == 0) {
            errno = 0;
            *context = verbs->open_device(found[i]);
            status = *context ? ww_status_of(WW_DONE, 0, "ibv_open_device") : failed(errno, "ibv_open_device");
            break;
        }
    }
    if (found) {
        verbs->free_device_list(found);
    }
    if (*context && make_non_blocking((*context)->async_fd) < 0) {
        status = failed(errno, "fcntl");
        verbs->close_device(*context);
        *context = NULL;
    }
    return status;
}

int ww_context_close(const struct ww_verbs *verbs, struct ibv_context *context)
{
    return verbs->close_device(context);
}

struct ww_status ww_port_count(const struct ww_verbs *verbs, struct ibv_context *context, int *count)
{
    struct ibv_device_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    int error = verbs->query_device(context, &attributes);
    *count = error ? 0 : attributes.phys_port_cnt;
    return error ? failed(error < 0 ? errno : error, "ibv_query_device") : ww_status_of(WW_DONE, 0, "ibv_query_device");
}

struct ww_status ww_port(const struct ww_verbs *verbs, struct ibv_context *context, int port, struct ww_port_info *info)
{
    if (!ww_is_port(port)) {
        return failed(EINVAL, "ibv_query_port");
    }
    /* The function of version 1.1 fills an older, shorter form of the struct. */
    struct ibv_port_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    int error = verbs->query_port(context, (uint8_t)port, &attributes);
    if (error) {
        return failed(error < 0 ? errno : error, "ibv_query_port");
    }
    info->state = attributes.state;
    info->mtu = attributes.active_mtu;
    info->max_mtu = attributes.max_mtu;
    info->link_layer = attributes.link_layer;
    info->width = attributes.active_width;
    info->speed = attributes.active_speed;
    info->gid_count = attributes.gid_tbl_len;
    return ww_status_of(WW_DONE, 0, "ibv_query_port");
}

/* Where the library cannot tell: what the kernel says in sysfs. */
static int type_from_sysfs(struct ibv_context *context, int port, int index)
{
    char path[512], text[32];
    int type = WW_GID_UNKNOWN;
    snprintf(path, sizeof path, "%s/ports/%d/gid_attrs/types/%d", context->device->ibdev_path, port, index);
    FILE *file = fopen(path, "re");
    if (!file) {
        return type;
    }
    if (fgets(text, sizeof text, file)) {
        if (strncmp(text, "RoCE v2", 7) == 0) {
            type = WW_GID_ROCE_V2;
        } else if (strncmp(text, "IB/RoCE v1", 10) == 0) {
            type = WW_GID_ROCE_V1;
        }
    }
    fclose(file);
    return type;
}

struct ww_status ww_gid(const struct ww_verbs *verbs, struct ibv_context *context, int port, int index, uint8_t raw[16],
                        int *type)
{
    static const uint8_t nothing[16];
    memset(raw, 0, 16);
    *type = WW_GID_UNKNOWN;
    if (!ww_is_port(port)) {
        return failed(EINVAL, "ibv_query_gid");
    }
    if (verbs->query_gid_ex) {
        struct ibv_gid_entry entry;
        memset(&entry, 0, sizeof entry);
        int error = verbs->query_gid_ex(context, (uint32_t)port, (uint32_t)index, &entry, 0, sizeof entry);
        if (error < 0) {
            error = errno;
        }
        if (error == ENODATA) {
            return ww_status_of(WW_SHORT, 0, "ibv_query_gid_ex");
        }
        if (error == 0) {
            memcpy(raw, entry.gid.raw, 16);
            *type = (int)entry.gid_type;
            return ww_status_of(memcmp(raw, nothing, 16) ? WW_DONE : WW_SHORT, 0, "ibv_query_gid_ex");
        }
        if (error != EOPNOTSUPP && error != ENOSYS) {
            return failed(error, "ibv_query_gid_ex");
        }
    }
    union ibv_gid gid;
    memset(&gid, 0, sizeof gid);
    errno = 0;
    if (verbs->query_gid(context, (uint8_t)port, index, &gid)) {
        return failed(errno, "ibv_query_gid");
    }
    memcpy(raw, gid.raw, 16);
    if (memcmp(raw, nothing, 16) == 0) {
        return ww_status_of(WW_SHORT, 0, "ibv_query_gid");
    }
    *type = type_from_sysfs(context, port, index);
    return ww_status_of(WW_DONE, 0, "ibv_query_gid");
}
