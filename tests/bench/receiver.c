/* A frontend that costs next to nothing: reads requests, confirms them, counts. HTTP/1.1 with keep-alive, Content-Length
 * or chunks. It must not be the bottleneck of what is measured: one epoll loop, bodies are not looked at but for
 * counting entries in small ones; large ones are thrown away in the kernel (MSG_TRUNC), in pieces worth waking for.
 *
 *   receiver PORT [LOG]
 *
 * GET /stats answers counters as JSON; POST /reset clears them. After POST /reset-and-log each small body is written
 * into LOG, with the time at which its last byte came. PUT and PROPFIND are there for WebDAV clients. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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

#define SMALL (1u << 20)  /* bodies up to this are kept and looked at */
#define HEAD_MAX 16384
#define PIECE (256 << 10) /* of a large body */
#define CONNECTIONS 4096

struct conn {
    char *buf;            /* head, then body while it is small */
    size_t have, cap;
    size_t head;          /* length of the head, 0 while it is not complete */
    int64_t length, left; /* of the body; -1: chunked */
    int large, chunked;
    int low;              /* SO_RCVLOWAT */
    char method[12], path[200];
};

static struct conn conns[CONNECTIONS];
static struct {
    uint64_t requests, entries, bytes, large;
    double first, last;   /* CLOCK_REALTIME: head of the first, end of the last request */
    double file;          /* head of the first recording */
} stats;
static FILE *logfile;
static int logging;
static struct {
    char path[200];
    uint64_t size;
} puts_seen[256]; /* for a WebDAV client that looks at what it wrote */
static unsigned put_next;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void forget(int fd) {
    struct conn *c = &conns[fd];
    free(c->buf);
    memset(c, 0, sizeof *c);
    close(fd);
}

static const char *field(const char *head, const char *name) {
    size_t n = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, n) && line[2 + n] == ':') {
            line += 3 + n;
            while (*line == ' ') line++;
            return line;
        }
    return NULL;
}

static int answer(int fd, const char *status, const char *type, const char *body) {
    char out[2048];
    int n = snprintf(out, sizeof out,
                     "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n%s", status, type, strlen(body), body);
    return send(fd, out, n, MSG_NOSIGNAL) == n ? 0 : -1;
}

/* By the letter that is rare elsewhere: memmem costs more than all the rest. */
static uint64_t count(const char *text, size_t length) {
    static const char word[] = "\"entityType\":";
    const size_t before = 7, after = sizeof word - 1 - before; /* of its T */
    uint64_t found = 0;
    const char *end = text + length, *at = text;
    while ((at = memchr(at, 'T', end - at))) {
        if ((size_t)(at - text) >= before && (size_t)(end - at) >= after && !memcmp(at - before, word, sizeof word - 1))
            found++;
        at++;
    }
    return found;
}

/* How much of a large body must be there before we are woken. */
static void wake_at(int fd, struct conn *c) {
    int low = c->head && c->large && !c->chunked && c->left > 0 ? (c->left < PIECE ? c->left : PIECE) : 1;
    if (low != (c->low ? c->low : 1)) setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
    c->low = low;
}

static int finish(int fd, struct conn *c) {
    char text[600];
    double at = now();
    if (!strcmp(c->method, "GET") && !strncmp(c->path, "/stats", 6)) {
        snprintf(text, sizeof text,
                 "{\"requests\":%llu,\"entries\":%llu,\"bytes\":%llu,\"large\":%llu,\"first\":%.6f,\"last\":%.6f,\"file\":%.6f}",
                 (unsigned long long)stats.requests, (unsigned long long)stats.entries,
                 (unsigned long long)stats.bytes, (unsigned long long)stats.large, stats.first, stats.last,
                 stats.file);
        return answer(fd, "200 OK", "application/json", text);
    }
    if (!strncmp(c->path, "/reset", 6)) {
        memset(&stats, 0, sizeof stats);
        memset(puts_seen, 0, sizeof puts_seen); /* a client that finds its file here does not send it */
        logging = logfile && !strncmp(c->path, "/reset-and-log", 14);
        if (logfile && (fflush(logfile) || ftruncate(fileno(logfile), 0))) return -1;
        return answer(fd, "200 OK", "application/json", "{}");
    }
    if (!strcmp(c->method, "PROPFIND")) {
        int is_file = 0;
        uint64_t put_size = 0;
        for (unsigned i = 0; i < 256; i++)
            if (*puts_seen[i].path && !strcmp(puts_seen[i].path, c->path)) {
                is_file = 1;
                put_size = puts_seen[i].size;
            }
        if (!is_file && c->path[strlen(c->path) - 1] != '/') return answer(fd, "404 Not Found", "text/plain", "");
        snprintf(text, sizeof text,
                 "<?xml version=\"1.0\"?><d:multistatus xmlns:d=\"DAV:\"><d:response><d:href>%s</d:href><d:propstat>"
                 "<d:prop>%s<d:getcontentlength>%llu</d:getcontentlength></d:prop>"
                 "<d:status>HTTP/1.1 200 OK</d:status></d:propstat></d:response></d:multistatus>",
                 c->path, is_file ? "<d:resourcetype/>" : "<d:resourcetype><d:collection/></d:resourcetype>",
                 (unsigned long long)(is_file ? put_size : 0));
        return answer(fd, "207 Multi-Status", "application/xml", text);
    }
    if (!strcmp(c->method, "MKCOL")) return answer(fd, "201 Created", "text/plain", "");
    stats.last = at;
    stats.requests++;
    if (c->large) stats.large++;
    else if (!c->chunked && c->length > 0) {
        stats.entries += count(c->buf + c->head, c->length);
        if (logging) {
            uint32_t n = c->length;
            fwrite(&at, sizeof at, 1, logfile);
            fwrite(&n, sizeof n, 1, logfile);
            fwrite(c->buf + c->head, 1, n, logfile);
            fflush(logfile);
        }
    }
    if (!strcmp(c->method, "PUT")) {
        strcpy(puts_seen[put_next % 256].path, c->path);
        puts_seen[put_next++ % 256].size = c->length > 0 ? c->length : 0;
        return answer(fd, "201 Created", "text/plain", "");
    }
    return answer(fd, "200 OK", "application/json", "{\"ok\":true,\"fileUrl\":\"http://frontend.example/mixed.wav\"}");
}

static int start(int fd, struct conn *c) {
    const char *end = memmem(c->buf, c->have, "\r\n\r\n", 4), *value;
    if (!end) return c->have < HEAD_MAX ? 0 : -1;
    c->head = end + 4 - c->buf;
    char kept = c->buf[c->head - 2];
    c->buf[c->head - 2] = 0;
    if (sscanf(c->buf, "%11s %199s", c->method, c->path) != 2) return -1;
    value = field(c->buf, "Content-Length");
    c->length = value ? atoll(value) : 0;
    value = field(c->buf, "Transfer-Encoding");
    c->chunked = value && !strncasecmp(value, "chunked", 7);
    c->large = c->length > SMALL || c->chunked;
    value = field(c->buf, "Expect");
    c->buf[c->head - 2] = kept;
    if (value && c->have == c->head && send(fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL) != 25) return -1;
    if (stats.first == 0 && c->path[1] != 's' && c->path[1] != 'r' && strcmp(c->method, "PROPFIND")) stats.first = now();
    if (stats.file == 0 && (strstr(c->path, "recording-file") || !strcmp(c->method, "PUT"))) stats.file = now();
    size_t body = c->have - c->head;
    if (c->large && !c->chunked) {
        stats.bytes += body;
        c->left = c->length - body;
        c->have = c->head;
    } else if (c->chunked) {
        stats.bytes += body;
    } else if (c->head + c->length + 1 > c->cap) {
        c->cap = c->head + c->length + 65536;
        if (!(c->buf = realloc(c->buf, c->cap))) return -1;
    }
    return 1;
}

/* 1: go on with what is there; 0: wait for more; -1: the connection is done. */
static int step(int fd, struct conn *c) {
    if (!c->head) {
        int begun = start(fd, c);
        if (begun <= 0) return begun;
    }
    if (c->chunked) {
        if (c->have < 5 || memcmp(c->buf + c->have - 5, "0\r\n\r\n", 5)) {
            if (c->have - c->head > 64) { /* keep the end of it */
                memmove(c->buf + c->head, c->buf + c->have - 8, 8);
                c->have = c->head + 8;
            }
            return 0;
        }
        if (finish(fd, c)) return -1;
        c->have = c->head = 0;
        c->chunked = c->large = 0;
        return 0;
    }
    if (c->large) {
        if (c->left > 0) return 0;
        if (finish(fd, c)) return -1;
        c->have = c->head = c->large = 0;
        return 0;
    }
    if (c->have < c->head + c->length) return 0;
    if (finish(fd, c)) return -1;
    if (strncmp(c->path, "/stats", 6) && strncmp(c->path, "/reset", 6)) stats.bytes += c->length;
    size_t used = c->head + c->length;
    memmove(c->buf, c->buf + used, c->have - used);
    c->have -= used;
    c->head = 0;
    return c->have > 0;
}

static int readable(int fd) {
    struct conn *c = &conns[fd];
    for (;;) {
        ssize_t got;
        if (c->head && c->large && !c->chunked && c->left > 0) {
            size_t want = c->left < (4 << 20) ? c->left : (4 << 20);
            got = recv(fd, NULL, want, MSG_TRUNC | MSG_DONTWAIT);
            if (got > 0) {
                c->left -= got;
                stats.bytes += got;
            }
        } else {
            if (c->cap - c->have < 65536) {
                c->cap = c->cap ? c->cap * 2 : 131072;
                if (!(c->buf = realloc(c->buf, c->cap))) return -1;
            }
            got = recv(fd, c->buf + c->have, c->cap - c->have, MSG_DONTWAIT);
            if (got > 0) {
                if (c->head && c->chunked) stats.bytes += got;
                c->have += got;
            }
        }
        if (got < 0) {
            if (errno != EAGAIN && errno != EINTR) return -1;
            wake_at(fd, c);
            return 0;
        }
        if (got == 0) return -1;
        int more;
        while ((more = step(fd, c)) > 0) {}
        if (more < 0) return -1;
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0)};
    struct epoll_event events[256], event = {.events = EPOLLIN};
    socklen_t size = sizeof address;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), loop = epoll_create1(0);
    signal(SIGPIPE, SIG_IGN);
    if (argc > 2 && !(logfile = fopen(argv[2], "ab"))) return 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1024)) return 1;
    getsockname(listener, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    event.data.fd = listener;
    epoll_ctl(loop, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int n = epoll_wait(loop, events, 256, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (fd >= CONNECTIONS) {
                        close(fd);
                        continue;
                    }
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    event.data.fd = fd;
                    epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event);
                }
            } else if (readable(fd) < 0) {
                forget(fd);
            }
        }
    }
}
