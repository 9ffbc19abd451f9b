"""UCX by libucp."""
