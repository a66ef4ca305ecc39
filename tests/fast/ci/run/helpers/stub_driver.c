/* A stand-in for libcuda, libamdhip64 and libnvidia-ml that misbehaves on request.
 *
 * STUB_DEVICES  devices of the host (default 1)
 * STUB_FAULT    "", "802" (context creation fails), "hang" (context creation never returns),
 *               "corrupt" (one byte read back differs), "peer" (peer copy leaves the target untouched),
 *               "crash" (SIGSEGV at init), "alloc" (out of memory)
 * STUB_FREE_MIB free memory of every device (default: all)
 * STUB_USER     pid that NVML names as the user of every device
 */
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOTAL_MIB 143000ull
#define MIB (1ull << 20)

static const char *fault(void) { const char *f = getenv("STUB_FAULT"); return f ? f : ""; }
static int is(const char *name) { return strcmp(fault(), name) == 0; }
static int devices(void) { const char *n = getenv("STUB_DEVICES"); return n ? atoi(n) : 1; }

static int visible(const char *variable) {
    const char *list = getenv(variable);
    if (!list) return devices();
    if (!*list) return 0;
    int count = 1;
    for (; *list; list++) count += *list == ',';
    return count;
}

static int open_device(void) {
    if (is("802")) return 802;
    if (is("hang")) for (;;) pause();
    return 0;
}

/* ---- CUDA driver API ---- */
int cuInit(unsigned flags) { (void)flags; if (is("crash")) raise(SIGSEGV); return 0; }
int cuDeviceGetCount(int *count) { *count = visible("CUDA_VISIBLE_DEVICES"); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stub %d", device); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return open_device(); }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (is("alloc")) return 2;
    *address = (uint64_t)(uintptr_t)malloc(size);
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)(uintptr_t)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, (void *)(uintptr_t)from, size);
    if (is("corrupt")) ((char *)to)[size / 2] ^= 1;
    return 0;
}
int cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return 0; }
int cuDeviceCanAccessPeer(int *able, int device, int peer) { *able = device != peer; return 0; }
int cuMemcpyPeer(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t size) {
    (void)to_context; (void)from_context;
    if (!is("peer")) memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 802 ? "system not yet initialized" : code == 2 ? "out of memory" : "unknown";
    return 0;
}

/* ---- HIP runtime ---- */
static int current;
int hipInit(unsigned flags) { return cuInit(flags); }
int hipGetDeviceCount(int *count) { *count = visible("HIP_VISIBLE_DEVICES"); return 0; }
int hipDriverGetVersion(int *version) { *version = 70000000; return 0; }
int hipDeviceGetName(char *name, int size, int device) { return cuDeviceGetName(name, size, device); }
int hipSetDevice(int device) { current = device; return open_device(); }
int hipMalloc(void **address, size_t size) { if (is("alloc")) return 2; *address = malloc(size); return 0; }
int hipMemcpy(void *to, const void *from, size_t size, int kind) {
    memcpy(to, from, size);
    if (kind == 2 && is("corrupt")) ((char *)to)[size / 2] ^= 1;
    return 0;
}
int hipFree(void *address) { free(address); return 0; }
int hipDeviceCanAccessPeer(int *able, int device, int peer) { *able = device != peer; return 0; }
int hipMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
    (void)to_device; (void)from_device;
    if (!is("peer")) memcpy(to, from, size);
    return 0;
}
const char *hipGetErrorString(int code) { return code == 2 ? "out of memory" : "unknown"; }

/* ---- NVML ---- */
struct memory { unsigned long long total, free, used; };
struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem; char bus_id[32]; };
struct user { unsigned pid; unsigned long long used; unsigned gpu, compute; };

int nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = devices(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    (void)handle;
    const char *left = getenv("STUB_FREE_MIB");
    memory->total = TOTAL_MIB * MIB;
    memory->free = left ? strtoull(left, NULL, 10) * MIB : memory->total;
    memory->used = memory->total - memory->free;
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02lX:00.0", (unsigned long)(uintptr_t)handle);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%08lx-0000-0000-0000-000000000000", (unsigned long)(uintptr_t)handle);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { (void)handle; snprintf(name, size, "NVIDIA %s", getenv("STUB_MODEL") ? getenv("STUB_MODEL") : "H200"); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct user *table) {
    (void)handle;
    const char *pid = getenv("STUB_USER");
    *count = pid ? 1 : 0;
    if (pid) { table[0].pid = atoi(pid); table[0].used = 4096 * MIB; }
    return 0;
}
