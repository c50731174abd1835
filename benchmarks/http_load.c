/* Send HTTP/1.1 requests at a rate or as fast as they are answered, and print what was answered and how late.
 *
 *     http_load PORT CONNECTIONS RATE SECONDS DEPTH ROTATE OBEY RANDOM ADDRESSES FILE
 *
 * RATE is requests per second over all connections; 0: each connection sends when its last request is answered.
 * DEPTH bounds the unanswered requests of a connection. A request that is due and has no place is sent late, and its
 * latency counts from when it was due. ROTATE=1: each connection sends the requests in turn; 0: connection i sends
 * request i modulo their number; 2: each request is sent once, in their order, by whichever connection is next, and the
 * load ends with the last one. OBEY=1: a connection that gets Retry-After waits so long. RANDOM=1: requests are due at
 * random times, as those of many independent clients (a Poisson process), and latencies count after the first second, in
 * which all connections are new; 0: at equal intervals. ADDRESSES: the connections come from so many addresses of the
 * loopback network in turn; 0: from 127.0.0.1. FILE has the requests, each after its length in digits and a line feed.
 * One thread, epoll, loopback only. Prints one JSON object.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_DEPTH 4096
#define HEAD_BYTES 8192
#define MOST_SAMPLES 4000000
#define ONCE 2

typedef struct {
    int fd, request, number, want_write;
    double free_at;
    /* The requests that were written, oldest first: a ring of the instants at which they were due. */
    double due[MOST_DEPTH];
    uint32_t first, count;
    /* The request that is being written. */
    const char *out;
    size_t out_left;
    /* The answer that is being read. */
    char head[HEAD_BYTES];
    size_t head_bytes, body_left;
    int status;
} Connection;

static char **requests;
static size_t *request_bytes;
static int request_count, next_once, depth, rotate, obey, is_random, addresses, epoll_fd, port;
static long answers[600], closed, sent;
static float *samples;
static size_t sample_count;
static double counts_from;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void watch(Connection *c, int operation) {
    struct epoll_event event = {.events = EPOLLIN | (c->out_left ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll_fd, operation, c->fd, &event)) fail("epoll_ctl");
    c->want_write = c->out_left > 0;
}

static void connect_one(Connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (addresses) {
        struct sockaddr_in own = {.sin_family = AF_INET};
        own.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + c->number % addresses);
        setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        if (bind(c->fd, (struct sockaddr *)&own, sizeof own)) fail("bind");
    }
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->count = c->first = 0;
    c->head_bytes = c->body_left = c->out_left = 0;
    watch(c, EPOLL_CTL_ADD);
}

static void reconnect(Connection *c, double at) {
    close(c->fd);
    closed++;
    connect_one(c);
    if (c->free_at < at + 0.1) c->free_at = at + 0.1;
}

static void flush(Connection *c) {
    while (c->out_left) {
        ssize_t n = send(c->fd, c->out, c->out_left, MSG_NOSIGNAL);
        if (n < 0) break;
        c->out += n;
        c->out_left -= n;
    }
    if (c->want_write != (c->out_left > 0)) watch(c, EPOLL_CTL_MOD);
}

static int all_sent(void) {
    return rotate == ONCE && next_once == request_count;
}

static int has_place(Connection *c, double at) {
    return !c->out_left && (int)c->count < depth && c->free_at <= at;
}

static void send_one(Connection *c, double due) {
    c->due[(c->first + c->count++) % MOST_DEPTH] = due;
    if (rotate == ONCE) c->request = next_once++;
    c->out = requests[c->request];
    c->out_left = request_bytes[c->request];
    if (rotate == 1) c->request = (c->request + 1) % request_count;
    sent++;
    flush(c);
}

static void answered(Connection *c, double at) {
    answers[c->status % 600]++;
    double due = c->due[c->first];
    if (c->status < 300 && due >= counts_from && sample_count < MOST_SAMPLES) samples[sample_count++] = at - due;
    c->first = (c->first + 1) % MOST_DEPTH;
    c->count--;
    c->head_bytes = 0;
}

/* Return the value of a header field of the head, or NULL. */
static const char *field(Connection *c, const char *name) {
    size_t length = strlen(name);
    for (char *line = strstr(c->head, "\r\n"); line; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, length) && line[2 + length] == ':') return line + 3 + length;
    return NULL;
}

static void received(Connection *c, const char *data, size_t bytes, double at) {
    while (bytes) {
        if (c->body_left) {
            size_t n = bytes < c->body_left ? bytes : c->body_left;
            c->body_left -= n;
            data += n;
            bytes -= n;
            if (!c->body_left) answered(c, at);
            continue;
        }
        c->head[c->head_bytes++] = *data++;
        bytes--;
        if (c->head_bytes >= HEAD_BYTES - 1) fail("an answer's head is too long");
        if (c->head_bytes < 4 || memcmp(c->head + c->head_bytes - 4, "\r\n\r\n", 4)) continue;
        c->head[c->head_bytes] = 0;
        c->status = atoi(c->head + 9);
        const char *length = field(c, "content-length"), *after = field(c, "retry-after");
        if (obey && after) c->free_at = at + atof(after);
        c->body_left = length ? strtoul(length, NULL, 10) : 0;
        if (!c->body_left) answered(c, at);
    }
}

static int read_all(Connection *c, double at) {
    static char buffer[65536];
    for (;;) {
        ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
        if (n > 0) received(c, buffer, n, at);
        else if (n < 0 && errno == EAGAIN) return 1;
        else return 0;
        if (n < (ssize_t)sizeof buffer) return 1;
    }
}

/* Return the seconds from one request to the next. */
static double interval(double rate) {
    static uint64_t state = 88172645463325252u;
    if (!is_random) return 1 / rate;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return -log(((state >> 11) + 1) * 0x1p-53) / rate;
}

/* Wait until the kernel has news, or so many seconds: epoll_wait alone waits for whole milliseconds. */
static void wait_for_news(double seconds) {
    struct pollfd news = {.fd = epoll_fd, .events = POLLIN};
    struct timespec most = {.tv_sec = 0, .tv_nsec = (long)(seconds * 1e9)};
    ppoll(&news, 1, &most, NULL);
}

static void read_requests(const char *path) {
    FILE *f = fopen(path, "rb");
    size_t bytes;
    if (!f) fail(path);
    while (fscanf(f, "%zu", &bytes) == 1) {
        if (!(request_count & (request_count + 1))) {
            requests = realloc(requests, 2 * (request_count + 1) * sizeof *requests);
            request_bytes = realloc(request_bytes, 2 * (request_count + 1) * sizeof *request_bytes);
        }
        char *request = requests[request_count] = malloc(bytes);
        if (fgetc(f) != '\n' || fread(request, 1, bytes, f) != bytes) fail("a request is shorter than its length says");
        request_bytes[request_count++] = bytes;
    }
    fclose(f);
    if (!request_count) fail("no request");
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(double share) {
    return sample_count ? 1e3 * samples[(size_t)(share * (sample_count - 1))] : -1;
}

int main(int count, char **words) {
    if (count != 11) {
        fprintf(stderr, "http_load PORT CONNECTIONS RATE SECONDS DEPTH ROTATE OBEY RANDOM ADDRESSES FILE\n");
        return 2;
    }
    port = atoi(words[1]);
    int connections = atoi(words[2]);
    double rate = atof(words[3]), seconds = atof(words[4]);
    depth = atoi(words[5]) < MOST_DEPTH ? atoi(words[5]) : MOST_DEPTH;
    rotate = atoi(words[6]);
    obey = atoi(words[7]);
    is_random = atoi(words[8]);
    addresses = atoi(words[9]);
    signal(SIGPIPE, SIG_IGN);
    read_requests(words[10]);
    samples = malloc(sizeof(float) * MOST_SAMPLES);
    Connection *all = calloc(connections, sizeof *all);
    struct epoll_event events[512];
    epoll_fd = epoll_create1(0);
    for (int i = 0; i < connections; i++) {
        all[i].request = i % request_count;
        all[i].number = i;
        connect_one(&all[i]);
    }
    double start = now(), at = start, next = start;
    long turn = 0;
    counts_from = start + is_random;
    while (at < start + seconds + 2) {
        int is_over = at >= start + seconds || all_sent();
        if (rate > 0) {
            /* Due requests go to the connections in turn; at most 1,000 before answers are read again. */
            for (int burst = 0; !is_over && !all_sent() && next <= at && burst < 1000; burst++) {
                Connection *c = NULL;
                for (int tried = 0; tried < connections && tried < 64; tried++, turn++) {
                    if (has_place(&all[turn % connections], at)) { c = &all[turn++ % connections]; break; }
                }
                if (!c) break;
                send_one(c, next);
                next += interval(rate);
            }
        } else {
            for (int i = 0; !is_over && i < connections; i++)
                while (!all_sent() && has_place(&all[i], at)) send_one(&all[i], at);
        }
        if (is_over) {
            long open = 0;
            for (int i = 0; i < connections; i++) open += all[i].count;
            if (!open) break;
        }
        double left = rate > 0 ? next - now() : 0;
        wait_for_news(left <= 0 ? 0.001 : left > 0.05 ? 0.05 : left);
        int ready = epoll_wait(epoll_fd, events, 512, 0);
        at = now();
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if ((events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) && !read_all(c, at)) {
                reconnect(c, at);
                continue;
            }
            if (events[i].events & EPOLLOUT) flush(c);
        }
    }
    long unanswered = 0;
    for (int i = 0; i < connections; i++) unanswered += all[i].count;
    qsort(samples, sample_count, sizeof *samples, by_size);
    printf("{\"seconds\": %.3f, \"sent\": %ld, \"unanswered\": %ld, \"closed\": %ld, \"answers\": {", at - start, sent,
           unanswered, closed);
    const char *comma = "";
    for (int s = 0; s < 600; s++)
        if (answers[s]) printf("%s\"%d\": %ld", comma, s, answers[s]), comma = ", ";
    printf("}, \"p50_ms\": %.2f, \"p99_ms\": %.2f, \"max_ms\": %.2f}\n", percentile(0.5), percentile(0.99),
           percentile(1));
    return 0;
}
