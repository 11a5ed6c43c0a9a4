/* System faults for one process; load this library with LD_PRELOAD.

   FAULT_PATH, FAULT_AFTER, FAULT_ERRNO: the call number FAULT_AFTER, and every later one, that writes to, syncs or
   renames a file below FAULT_PATH fails with that errno. FAULT_COUNT: a file that gets the number of such calls.
   CLOCK_AFTER, CLOCK_BACK: after CLOCK_AFTER seconds, the wall clock is CLOCK_BACK seconds earlier. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls;
/* The next definition of a function, looked up once. */
#define NEXT(name) \
  ({ \
    static _Atomic(void *) next; \
    void *function = atomic_load_explicit(&next, memory_order_acquire); \
    if (!function) atomic_store_explicit(&next, function = dlsym(RTLD_NEXT, #name), memory_order_release); \
    (__typeof__(&name))function; \
  })

static int below(const char *path) {
  const char *prefix = getenv("FAULT_PATH");
  return prefix && path && !strncmp(path, prefix, strlen(prefix));
}

static int fails(void) {
  long number = ++calls, after = atol(getenv("FAULT_AFTER") ? getenv("FAULT_AFTER") : "0");
  if (!after || number < after) return 0;
  errno = atoi(getenv("FAULT_ERRNO"));
  return 1;
}

static int fd_fails(int fd) {
  char link[64], path[4096];
  if (!getenv("FAULT_PATH")) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path) && fails();
}

ssize_t write(int fd, const void *data, size_t size) { return fd_fails(fd) ? -1 : NEXT(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  return fd_fails(fd) ? -1 : NEXT(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  return fd_fails(fd) ? -1 : NEXT(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
  return fd_fails(fd) ? -1 : NEXT(writev)(fd, parts, number);
}
int fsync(int fd) { return fd_fails(fd) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fd_fails(fd) ? -1 : NEXT(fdatasync)(fd); }
int rename(const char *from, const char *to) { return below(to) && fails() ? -1 : NEXT(rename)(from, to); }

int clock_gettime(clockid_t clock, struct timespec *now) {
  static atomic_long began;
  int result = NEXT(clock_gettime)(clock, now);
  if (clock != CLOCK_REALTIME || !getenv("CLOCK_AFTER")) return result;
  if (!began) began = now->tv_sec;
  if (now->tv_sec - began >= atol(getenv("CLOCK_AFTER"))) now->tv_sec -= atol(getenv("CLOCK_BACK"));
  return result;
}

__attribute__((destructor)) static void count(void) {
  const char *path = getenv("FAULT_COUNT");
  if (!path) return;
  FILE *file = fopen(path, "w");
  if (file) fprintf(file, "%ld\n", (long)calls), fclose(file);
}
