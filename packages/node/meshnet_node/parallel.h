/* Work in the team of threads that torch computes with. */

typedef void parallel(void (*part)(void *), void *data, unsigned threads, unsigned flags); /* libgomp's GOMP_parallel */
