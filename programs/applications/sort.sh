# BusyBox makes lines of half a KiB and sorts them. The first argument is the number of lines.
lines() {
    busybox awk -v lines="$1" 'BEGIN {
        for (text = "page table "; length(text) < 500; text = text text);
        for (seed = 1; lines > 0; lines--) {
            seed = (seed * 16807) % 2147483647
            printf "%08x %s %d\n", seed, substr(text, seed % 40 + 1, 480), lines
        }
    }'
}
answer=$(lines "$1" | busybox sort | busybox md5sum)
echo "answer $answer" | busybox cut -c 1-23
