/* Lets user-mode Linux 6.1 start where the CPU has AMX: it restores a process's registers from a buffer that
 * is as large as AVX-512 needs, and the host's kernel refuses any that is shorter than all the CPU has. So
 * what it leaves out is filled in with what is there. Loaded with LD_PRELOAD.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char registers[1 << 15]; /* not on the stack: the kernel's are small */

static long forward(int request, pid_t pid, void *address, void *data)
{
    return syscall(SYS_ptrace, request, pid, address, data);
}

long ptrace(enum __ptrace_request request, ...)
{
    va_list rest;
    va_start(rest, request);
    pid_t pid = va_arg(rest, pid_t);
    void *address = va_arg(rest, void *);
    void *data = va_arg(rest, void *);
    va_end(rest);

    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word;
        return forward(request, pid, address, &word) < 0 ? -1 : word;
    }
    if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE) {
        struct iovec *given = data, all = {registers, sizeof registers};
        if (forward(PTRACE_GETREGSET, pid, address, &all) < 0)
            return -1;
        memcpy(registers, given->iov_base, given->iov_len < all.iov_len ? given->iov_len : all.iov_len);
        return forward(request, pid, address, &all);
    }
    return forward(request, pid, address, data);
}
