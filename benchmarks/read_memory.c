/* Read a buffer with all threads, each in several places of its share at once: what a decode step could at best do.
 * Compiled by benchmarks/peers.py. */
#include <omp.h>
#include <stdint.h>

typedef uint64_t vec __attribute__((vector_size(32), aligned(32)));

#define LINES(streams)                                                                   \
    for (int64_t i = 0; i < each; i += 2)                                                \
        for (int s = 0; s < streams; s++) {                                              \
            sums[s] ^= from[s * each + i];                                               \
            sums[s + 8] ^= from[s * each + i + 1];                                       \
        }

/* The exclusive or of `vectors` of 32 bytes, so that the compiler may leave none out; a few at the ends of shares
 * are not read. streams: 1, 2, 4 or 8. */
uint64_t read_memory(const vec *data, int64_t vectors, int64_t streams, int64_t threads) {
    uint64_t result = 0;
    #pragma omp parallel num_threads((int)threads) reduction(^ : result)
    {
        int64_t each = vectors / omp_get_num_threads() / streams / 2 * 2;
        const vec *from = data + omp_get_thread_num() * (vectors / omp_get_num_threads());
        vec sums[16] = {{0}};
        if (streams == 1) { LINES(1) }
        else if (streams == 2) { LINES(2) }
        else if (streams == 4) { LINES(4) }
        else { LINES(8) }
        for (int s = 1; s < 16; s++) sums[0] ^= sums[s];
        result = sums[0][0] ^ sums[0][1] ^ sums[0][2] ^ sums[0][3];
    }
    return result;
}
