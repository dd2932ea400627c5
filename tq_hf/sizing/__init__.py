"""What a cache is going to take, before there is one."""
