// What the kernels of this folder share: barriers in shared memory, and boxes of tensors loaded behind them (TMA).

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    char bytes[128];
};

u32 in_shared(const void* place) { return static_cast<u32>(__cvta_generic_to_shared(place)); }

void expect_arrivals(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// After the last expect_arrivals, by the thread that called it.
void barriers_are_set() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory"); }

void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

void wait_for(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

void load(u32 to, const TensorMap& from, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(&from), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

void load(u32 to, const TensorMap& from, u32 barrier, int column, int row, int layer) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(&from), "r"(barrier), "r"(column), "r"(row), "r"(layer)
        : "memory");
}
