/* The load of bench.transport: keep-alive HTTP/1.1 connections that ask again as soon as they are answered.
 *
 *     load PORT CONNECTIONS SECONDS <REQUEST
 *
 * sends the request as it stands and prints one line: answers, bad answers, seconds, CPU seconds of its own, and the 50th, 90th and 99th percentile of the time
 * to an answer in microseconds. An answer needs a content-length. In C, so that the client takes little of the machine
 * that it measures. One thread, one epoll. Exit status 1 when a connection fails.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ROOM 65536
#define MOST_SAMPLES 4000000

struct connection {
    int fd;
    size_t have;
    double asked_at;
    char data[ROOM];
};

static uint32_t samples[MOST_SAMPLES];
static size_t answers, bad;
static char request[ROOM];
static size_t request_size;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void ask(struct connection *it) {
    it->have = 0;
    it->asked_at = now();
    if (send(it->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) fail("send");
}

/* The size of the whole answer, or 0 while its head is incomplete. */
static size_t whole(const struct connection *it) {
    const char *end = memmem(it->data, it->have, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    for (const char *line = it->data; line < end; line = (const char *)memchr(line, '\n', ROOM) + 1)
        if (strncasecmp(line, "content-length:", 15) == 0)
            return (size_t)(end + 4 - it->data) + strtoul(line + 15, NULL, 10);
    errno = EPROTO;
    fail("an answer without a content-length");
    return 0;
}

static void receive(struct connection *it) {
    ssize_t got = recv(it->fd, it->data + it->have, ROOM - 1 - it->have, 0);
    if (got <= 0) {
        if (got == 0) errno = ECONNRESET;
        fail("recv");
    }
    it->have += (size_t)got;
    it->data[it->have] = 0;
    size_t size = whole(it);
    if (size == 0 || it->have < size) return;
    if (strncmp(it->data + 8, " 200", 4) != 0) bad++;
    if (answers < MOST_SAMPLES) samples[answers] = (uint32_t)((now() - it->asked_at) * 1e6);
    answers++;
    ask(it);
}

static int rising(const void *a, const void *b) {
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

static uint32_t percentile(size_t count, double part) { return count ? samples[(size_t)((double)(count - 1) * part)] : 0; }

int main(int count, char **words) {
    if (count != 4) {
        fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS <REQUEST\n");
        return 2;
    }
    int connections = atoi(words[2]);
    double seconds = atof(words[3]);
    request_size = fread(request, 1, sizeof request, stdin);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    struct connection *all = calloc((size_t)connections, sizeof *all);
    int poller = epoll_create1(0);
    for (int i = 0; i < connections; i++) {
        int on = 1;
        all[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(all[i].fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
        setsockopt(all[i].fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    double began = now();
    for (int i = 0; i < connections; i++) ask(&all[i]);
    while (now() - began < seconds) {
        struct epoll_event ready[64];
        int found = epoll_wait(poller, ready, 64, 100);
        for (int i = 0; i < found; i++) receive(ready[i].data.ptr);
    }
    double took = now() - began;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    size_t kept = answers < MOST_SAMPLES ? answers : MOST_SAMPLES;
    qsort(samples, kept, sizeof *samples, rising);
    printf("%zu %zu %.6f %.6f %u %u %u\n", answers, bad, took, cpu, percentile(kept, 0.5), percentile(kept, 0.9),
           percentile(kept, 0.99));
    return 0;
}
