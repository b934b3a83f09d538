/* A drive that stops answering, the same for every program: cc -shared -fPIC -o hang_reads.so hang_reads.c -ldl
 *
 * With LD_PRELOAD, reads of files below $HANG_UNDER block for as long as the file $HANG_WHILE exists.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_for_drive(int fd) {
    const char *under = getenv("HANG_UNDER"), *hanging = getenv("HANG_WHILE");
    if (!under || !hanging || access(hanging, F_OK)) return;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, under, strlen(under))) return;
    while (!access(hanging, F_OK)) usleep(5000);
}

#define WRAP(name, arguments, call)                               \
    ssize_t name arguments {                                      \
        static ssize_t(*real) arguments;                          \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);     \
        wait_for_drive(fd);                                       \
        return real call;                                         \
    }

WRAP(read, (int fd, void *to, size_t n), (fd, to, n))
WRAP(readv, (int fd, const struct iovec *to, int n), (fd, to, n))
WRAP(pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
WRAP(pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
WRAP(preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at))
WRAP(preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at))
WRAP(preadv2, (int fd, const struct iovec *to, int n, off_t at, int flags), (fd, to, n, at, flags))
WRAP(preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int flags), (fd, to, n, at, flags))
