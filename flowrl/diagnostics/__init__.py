"""What ``flowrl doctor`` and ``flowrl calibrate`` share: trials in processes of their own, and measured rates."""
