// A kernel that never ends, for tests of the recovery from one. Grid: any.

extern "C" __global__ void hang() {
    for (;;) asm volatile("nanosleep.u32 1000;");
}
