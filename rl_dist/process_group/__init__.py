"""The process group of all ranks: joining, collective calls, timing, a watchdog."""
