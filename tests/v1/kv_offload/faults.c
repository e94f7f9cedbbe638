/* Fails file calls as a bad disk does: preloaded, and told what to fail by the process itself.

   fail_calls("fdatasync", 2, EIO, 0) lets the second call from now on fail, and all that follow;
   with a length it cuts a write short instead: half is written, and then the call fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

static char failing[32];
static int left, code, is_torn;

void fail_calls(const char *name, int nth, int error, int torn) {
  strncpy(failing, name, sizeof failing - 1);
  left = nth;
  code = error;
  is_torn = torn;
}

static int fails(const char *name) {
  if (strcmp(name, failing) != 0) return 0;
  if (left > 1) {
    left--;
    return 0;
  }
  return 1;
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

static ssize_t tear(int fd, const struct iovec *parts, off_t at) {
  ssize_t (*write_at)(int, const void *, size_t, off_t) =
      NEXT(ssize_t(*)(int, const void *, size_t, off_t), "pwrite64");
  write_at(fd, parts[0].iov_base, parts[0].iov_len / 2, at);
  errno = code;
  return -1;
}

#define VECTOR(symbol, name)                                                                  \
  ssize_t symbol(int fd, const struct iovec *parts, int count, off_t at) {                    \
    if (fails(name)) {                                                                        \
      if (is_torn) return tear(fd, parts, at);                                                \
      errno = code;                                                                           \
      return -1;                                                                              \
    }                                                                                         \
    return NEXT(ssize_t(*)(int, const struct iovec *, int, off_t), #symbol)(fd, parts, count, \
                                                                            at);              \
  }
#define VECTOR2(symbol, name)                                                                  \
  ssize_t symbol(int fd, const struct iovec *parts, int count, off_t at, int flags) {          \
    if (fails(name)) {                                                                         \
      if (is_torn) return tear(fd, parts, at);                                                 \
      errno = code;                                                                            \
      return -1;                                                                               \
    }                                                                                          \
    return NEXT(ssize_t(*)(int, const struct iovec *, int, off_t, int), #symbol)(fd, parts,    \
                                                                                 count, at,    \
                                                                                 flags);       \
  }

VECTOR(preadv, "read")
VECTOR(preadv64, "read")
VECTOR2(preadv2, "read")
VECTOR2(preadv64v2, "read")
VECTOR(pwritev, "write")
VECTOR(pwritev64, "write")
VECTOR2(pwritev2, "write")
VECTOR2(pwritev64v2, "write")

int fdatasync(int fd) {
  if (fails("sync")) {
    errno = code;
    return -1;
  }
  return NEXT(int (*)(int), "fdatasync")(fd);
}

/* These return the error. */
int posix_fallocate(int fd, off_t from, off_t length) {
  if (fails("allocate")) return code;
  return NEXT(int (*)(int, off_t, off_t), "posix_fallocate")(fd, from, length);
}

int posix_fallocate64(int fd, off_t from, off_t length) {
  if (fails("allocate")) return code;
  return NEXT(int (*)(int, off_t, off_t), "posix_fallocate64")(fd, from, length);
}
