"""Vector environments that use tensors: adapter, spaces, snapshots, guards."""
