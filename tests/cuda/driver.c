/* A CUDA driver of memory calls only, over memory files: libcuda.so.1 for the tests of
 * memory/vmm.py and memory/pinned.py on a machine without a GPU.
 *
 * It refuses what the documentation forbids (sizes and addresses off the granularity,
 * maps outside a reservation or over another map, maps of a part of an allocation,
 * access to what is not mapped, frees of what is mapped) and counts what is alive.
 * EMULATED_VMM_BYTES and EMULATED_PINNED_BYTES limit the memory of the device and what
 * the host may lock, EMULATED_VMM=0 is a device without virtual memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { PINNED = 1, READ_WRITE = 3, DEVICE = 1, MOST = 1024 };
enum { HOST_POINTERS_WORK = 91, VMM_SUPPORTED = 102 };
static const size_t GRANULARITY = 2ul << 20;

typedef uint64_t address;
typedef struct { int type, id; } location;
typedef struct { int type, handle_types; location where; } property; /* its front */
typedef struct { location where; int flags; } access_desc;

static struct { address base; size_t size; void *raw; size_t raw_size; } ranges[MOST];
static struct { address at; size_t size; int memory; } maps[MOST];
static struct { int file, references; size_t size; } memories[MOST];
static struct { address at; size_t size; } locked[MOST];
static size_t allocated, locked_bytes;

static int whole(size_t n) { return n != 0 && n % GRANULARITY == 0; }

static int limit_reached(size_t more) {
    const char *limit = getenv("EMULATED_VMM_BYTES");
    return limit && allocated + more > strtoull(limit, NULL, 10);
}

static void unreference(int memory) {
    if (--memories[memory].references) return;
    close(memories[memory].file);
    allocated -= memories[memory].size;
}

int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *vmm = getenv("EMULATED_VMM");
    if (device != 0) return INVALID;
    if (attribute == VMM_SUPPORTED) *value = !(vmm && *vmm == '0');
    else if (attribute == HOST_POINTERS_WORK) *value = 1;
    else return INVALID;
    return SUCCESS;
}

int cuDeviceGetPCIBusId(char *name, int size, int device) {
    if (device != 0 || size < 13) return INVALID;
    strcpy(name, "0000:00:00.0");
    return SUCCESS;
}

int cuMemHostRegister(address at, size_t size, unsigned flags) {
    const char *limit = getenv("EMULATED_PINNED_BYTES");
    int slot = -1;
    if (!size || at % 4096 || flags) return INVALID;
    if (limit && locked_bytes + size > strtoull(limit, NULL, 10)) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++) {
        if (!locked[i].size) { slot = i; continue; }
        if (at < locked[i].at + locked[i].size && locked[i].at < at + size)
            return ALREADY_REGISTERED;
    }
    if (slot < 0) return OUT_OF_MEMORY;
    locked[slot].at = at;
    locked[slot].size = size;
    locked_bytes += size;
    return SUCCESS;
}

int cuMemHostUnregister(address at) {
    for (int i = 0; i < MOST; i++) {
        if (!locked[i].size || locked[i].at != at) continue;
        locked_bytes -= locked[i].size;
        locked[i].size = 0;
        return SUCCESS;
    }
    return NOT_REGISTERED;
}

int cuMemGetAllocationGranularity(size_t *size, const property *p, int option) {
    (void)p; (void)option;
    *size = GRANULARITY;
    return SUCCESS;
}

int cuMemAddressReserve(address *out, size_t size, size_t align, address hint,
                        unsigned long long flags) {
    (void)hint;
    if (!whole(size) || align || flags) return INVALID;
    for (int i = 0; i < MOST; i++) {
        if (ranges[i].size) continue;
        size_t raw_size = size + GRANULARITY;
        void *raw = mmap(NULL, raw_size, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (raw == MAP_FAILED) return OUT_OF_MEMORY;
        address base = ((address)raw + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
        ranges[i].base = *out = base;
        ranges[i].size = size;
        ranges[i].raw = raw;
        ranges[i].raw_size = raw_size;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}

int cuMemAddressFree(address base, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (maps[i].size && maps[i].at >= base && maps[i].at < base + size)
            return INVALID;
    for (int i = 0; i < MOST; i++)
        if (ranges[i].size == size && ranges[i].base == base) {
            munmap(ranges[i].raw, ranges[i].raw_size);
            ranges[i].size = 0;
            return SUCCESS;
        }
    return INVALID;
}

int cuMemCreate(unsigned long long *out, size_t size, const property *p,
                unsigned long long flags) {
    if (!whole(size) || flags || p->type != PINNED || p->where.type != DEVICE)
        return INVALID;
    if (limit_reached(size)) return OUT_OF_MEMORY;
    for (int i = 1; i < MOST; i++) {
        if (memories[i].references) continue;
        int file = memfd_create("emulated-device", 0);
        if (file < 0 || ftruncate(file, size)) return OUT_OF_MEMORY;
        memories[i].file = file;
        memories[i].size = size;
        memories[i].references = 1;
        allocated += size;
        *out = i;
        return SUCCESS;
    }
    return OUT_OF_MEMORY;
}

int cuMemRelease(unsigned long long memory) {
    if (memory < 1 || memory >= MOST || !memories[memory].references) return INVALID;
    unreference(memory);
    return SUCCESS;
}

int cuMemMap(address at, size_t size, size_t offset, unsigned long long memory,
             unsigned long long flags) {
    if (memory < 1 || memory >= MOST || !memories[memory].references) return INVALID;
    if (at % GRANULARITY || offset || flags || size != memories[memory].size)
        return INVALID;
    int inside = 0, slot = -1;
    for (int i = 0; i < MOST; i++)
        inside |= ranges[i].size && at >= ranges[i].base &&
                  at + size <= ranges[i].base + ranges[i].size;
    if (!inside) return INVALID;
    for (int i = 0; i < MOST; i++) {
        if (!maps[i].size) { slot = i; continue; }
        if (at < maps[i].at + maps[i].size && maps[i].at < at + size) return INVALID;
    }
    if (slot < 0) return OUT_OF_MEMORY;
    /* Nobody may touch it before cuMemSetAccess. */
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED,
             memories[memory].file, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    maps[slot].at = at;
    maps[slot].size = size;
    maps[slot].memory = memory;
    memories[memory].references++;
    return SUCCESS;
}

int cuMemSetAccess(address at, size_t size, const access_desc *a, size_t count) {
    size_t covered = 0;
    if (count != 1 || a->flags != READ_WRITE || a->where.type != DEVICE) return INVALID;
    for (int i = 0; i < MOST; i++)
        if (maps[i].size && maps[i].at >= at && maps[i].at + maps[i].size <= at + size)
            covered += maps[i].size;
    if (covered != size) return INVALID;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID : SUCCESS;
}

int cuMemUnmap(address at, size_t size) {
    for (int i = 0; i < MOST; i++) {
        if (!maps[i].size || maps[i].at != at || maps[i].size != size) continue;
        mmap((void *)at, size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        unreference(maps[i].memory);
        maps[i].size = 0;
        return SUCCESS;
    }
    return INVALID;
}

/* What is alive: reservations, maps, allocations, registrations; and the bytes of the
 * last two. */
void emulated_alive(size_t counts[6]) {
    memset(counts, 0, 4 * sizeof *counts);
    for (int i = 0; i < MOST; i++) {
        counts[0] += ranges[i].size > 0;
        counts[1] += maps[i].size > 0;
        counts[2] += memories[i].references > 0;
        counts[3] += locked[i].size > 0;
    }
    counts[4] = allocated;
    counts[5] = locked_bytes;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                        int *status) {
    Dl_info me;
    (void)version; (void)flags;
    dladdr((void *)cuMemMap, &me);
    void *self = dlopen(me.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *out = dlsym(self, strcmp(name, "cuGetProcAddress") ? name : "cuGetProcAddress_v2");
    if (status) *status = *out ? 0 : 1;
    return *out ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
