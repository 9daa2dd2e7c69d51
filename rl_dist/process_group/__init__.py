"""The process group: start, collective calls, clocks and a watchdog of its ranks."""
