#!/bin/sh
# Runs a command on the processor with the number of its process, as the kind "processes, a core
# each" of benchmarks/scaling.py.
exec taskset -c "${TNT_PROCESS_ID:-0}" "$@"
