"""Vector environments of tensors: adapter, spaces, snapshots, guards."""
