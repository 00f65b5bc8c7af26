"""Generation speed: the measurement (`throughput`), and models of other libraries to compare with (`peers`)."""
