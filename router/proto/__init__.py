"""Generated gRPC modules of `pando.v1`; the source is pando.proto."""
