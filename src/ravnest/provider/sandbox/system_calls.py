"""System calls that a worker's filter knows by name, with their numbers on each processor. Pure.

A call that is not listed does not exist for a worker: it gets ``ENOSYS``, and libraries use what they
use on a kernel without it. ``clone3`` is left out on purpose: a filter cannot read its flags, and glibc
then starts threads with ``clone``.
"""

from __future__ import annotations

from dataclasses import dataclass

_PERMITTED = """
# files
read 0 63
write 1 64
readv 19 65
writev 20 66
pread64 17 67
pwrite64 18 68
preadv 295 69
pwritev 296 70
open 2 -
openat 257 56
close 3 57
close_range 436 436
stat 4 -
fstat 5 80
lstat 6 -
newfstatat 262 79
statx 332 291
lseek 8 62
access 21 -
faccessat 269 48
faccessat2 439 439
getdents 78 -
getdents64 217 61
readlink 89 -
readlinkat 267 78
rename 82 -
renameat 264 38
renameat2 316 276
mkdir 83 -
mkdirat 258 34
rmdir 84 -
unlink 87 -
unlinkat 263 35
ftruncate 77 46
fsync 74 82
fdatasync 75 83
sync_file_range 277 84
fallocate 285 47
fadvise64 221 223
flock 73 32
dup 32 23
dup2 33 -
dup3 292 24
pipe 22 -
pipe2 293 59
fcntl 72 25
ioctl 16 29
getcwd 79 17
chdir 80 49
fchdir 81 50
umask 95 166
statfs 137 43
fstatfs 138 44
sendfile 40 71
splice 275 76
# memory
mmap 9 222
mprotect 10 226
munmap 11 215
mremap 25 216
madvise 28 233
brk 12 214
msync 26 227
mincore 27 232
mlock 149 228
munlock 150 229
membarrier 324 283
mbind 237 235
get_mempolicy 239 236
set_mempolicy 238 237
# threads
clone 56 220
futex 202 98
set_robust_list 273 99
rseq 334 293
set_tid_address 218 96
gettid 186 178
getpid 39 172
getppid 110 173
getcpu 309 168
sched_yield 24 124
sched_getaffinity 204 123
sched_setaffinity 203 122
sched_getparam 143 121
sched_getscheduler 145 120
sched_get_priority_max 146 125
sched_get_priority_min 147 126
arch_prctl 158 -
prctl 157 167
exit 60 93
exit_group 231 94
# signals
kill 62 129
tgkill 234 131
rt_sigaction 13 134
rt_sigprocmask 14 135
rt_sigreturn 15 139
rt_sigsuspend 130 133
rt_sigtimedwait 128 137
rt_sigpending 127 136
sigaltstack 131 132
restart_syscall 219 128
pause 34 -
# time and identity
clock_gettime 228 113
clock_getres 229 114
clock_nanosleep 230 115
nanosleep 35 101
gettimeofday 96 169
time 201 -
times 100 153
getrusage 98 165
sysinfo 99 179
uname 63 160
getrandom 318 278
getrlimit 97 163
prlimit64 302 261
getpriority 140 141
getuid 102 174
geteuid 107 175
getgid 104 176
getegid 108 177
getresuid 118 148
getresgid 120 150
getgroups 115 158
getpgrp 111 -
getpgid 121 155
getsid 124 156
capget 125 90
# waiting
poll 7 -
ppoll 271 73
select 23 -
pselect6 270 72
epoll_create 213 -
epoll_create1 291 20
epoll_ctl 233 21
epoll_wait 232 -
epoll_pwait 281 22
epoll_pwait2 441 441
eventfd 284 -
eventfd2 290 19
timerfd_create 283 85
timerfd_settime 286 86
timerfd_gettime 287 87
# sockets
socket 41 198
socketpair 53 199
connect 42 203
bind 49 200
listen 50 201
accept 43 202
accept4 288 242
getsockname 51 204
getpeername 52 205
getsockopt 55 209
setsockopt 54 208
shutdown 48 210
sendto 44 206
recvfrom 45 207
sendmsg 46 211
recvmsg 47 212
"""
"""Name of each call of a worker, and its numbers on x86_64 and aarch64; ``-``: it has no such call."""

_REFUSED = """
fork 57 -
vfork 58 -
execve 59 221
execveat 322 281
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
chmod 90 -
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
chown 92 -
fchown 93 55
lchown 94 -
fchownat 260 54
link 86 -
linkat 265 37
symlink 88 -
symlinkat 266 36
truncate 76 45
setpriority 141 140
setrlimit 160 164
"""
"""Calls that get ``EPERM``: libraries may try them, and handle that they are forbidden."""


@dataclass(frozen=True)
class Processor:
    """Numbers of a kind of processor."""

    architecture: int
    """Value of ``seccomp_data.arch``."""
    permitted: dict[str, int]
    refused: dict[str, int]


def _column(table: str, column: int) -> dict[str, int]:
    rows = (line.split() for line in table.splitlines() if line and not line.startswith("#"))
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


PROCESSORS = {
    "x86_64": Processor(0xC000003E, _column(_PERMITTED, 1), _column(_REFUSED, 1)),
    "aarch64": Processor(0xC00000B7, _column(_PERMITTED, 2), _column(_REFUSED, 2)),
}
"""By the name that ``platform.machine`` returns."""
