/* What torch 2.11 (its CUDA 13 build) asks the driver and the runtime before it picks a kernel, answered without a
 * GPU: one device of compute capability 9.0, or of PRETENDED_SM=80 or 89. `make cuda-check` compiles and preloads it. */
#include <stdlib.h>
#include <string.h>

enum { SIZE = 368, MAJOR = 0x168 }; /* of cudaDeviceProp, as far as it is read; the minor number follows the major */

int pretended_device(void) { return 1; } /* so that a test can tell that this file is preloaded */

static int number(int *to, int value) { *to = value; return 0; }

static int properties(char *to) {
  const char *text = getenv("PRETENDED_SM");
  int sm = text ? atoi(text) : 90, version[2] = {sm / 10, sm % 10};
  memset(to, 0, SIZE);
  strcpy(to, "NVIDIA H200");
  memcpy(to + MAJOR, version, sizeof version);
  return 0;
}

int cudaGetDeviceProperties(void *to, int device) { return properties(to); }
int cudaGetDeviceProperties_v2(void *to, int device) { return properties(to); }
int cudaDeviceGetAttribute(int *to, int attribute, int device) { return number(to, 1); }
int cudaGetDeviceCount(int *to) { return number(to, 1); }
int cudaGetDevice(int *to) { return number(to, 0); }
int cudaSetDevice(int device) { return 0; }
int cudaDriverGetVersion(int *to) { return number(to, 13000); }
int cudaRuntimeGetVersion(int *to) { return number(to, 13000); }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; return number(greatest, 0); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; return number(active, 1); }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cudaStreamIsCapturing(void *stream, int *to) { return number(to, 0); }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaFree(void *memory) { return 0; }
