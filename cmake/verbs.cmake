# Which sources give RDMA: those that open libibverbs when it is wanted, or the one that says there is none.
# Only the headers are needed to build; nothing is linked.
find_package(Threads REQUIRED)
find_path(WW_VERBS_INCLUDE infiniband/verbs.h)
mark_as_advanced(WW_VERBS_INCLUDE)

set(WW_VERBS_SOURCES csrc/verbs/none.c)
if(NOT WEIGHTWIRE_VERBS MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "WEIGHTWIRE_VERBS is ${WEIGHTWIRE_VERBS}; it is auto, on or off")
elseif(WEIGHTWIRE_VERBS STREQUAL "off")
  message(STATUS "weightwire: built without RDMA, as asked (WEIGHTWIRE_VERBS=off)")
elseif(WW_VERBS_INCLUDE)
  message(STATUS "weightwire: built with RDMA (${WW_VERBS_INCLUDE}/infiniband/verbs.h)")
  set(WW_VERBS_SOURCES
    csrc/verbs/device.c
    csrc/verbs/link.c
    csrc/verbs/link_recv.c
    csrc/verbs/link_send.c
    csrc/verbs/link_wait.c
    csrc/verbs/objects.c
    csrc/verbs/table.c)
elseif(WEIGHTWIRE_VERBS STREQUAL "on")
  message(FATAL_ERROR "WEIGHTWIRE_VERBS=on and no infiniband/verbs.h (on Debian: apt-get install libibverbs-dev)")
else()
  message(WARNING "weightwire: built WITHOUT RDMA: no infiniband/verbs.h (on Debian: apt-get install libibverbs-dev)")
endif()
