"""What services with engines share: host processes, who may use them, and the memory they live in."""
