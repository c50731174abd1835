/* Preloaded into ferrokinesis, which has no setting for its address and would listen on every interface. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>

int bind(int descriptor, const struct sockaddr *address, socklen_t length) {
    int (*bind_as_asked)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in loopback;

    if (address->sa_family != AF_INET)
        return bind_as_asked(descriptor, address, length);
    loopback = *(const struct sockaddr_in *)address;
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return bind_as_asked(descriptor, (const struct sockaddr *)&loopback, sizeof loopback);
}
