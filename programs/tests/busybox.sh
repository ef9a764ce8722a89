#!/bin/busybox sh
# A script for BusyBox: what a shell and its tools need of a kernel. Prints a
# line for each thing; the exit status says if all were right.
# Runs where nothing but BusyBox is: every tool is called by its name through
# BusyBox's own search, or by the functions below.

busybox=/bin/busybox
[ -x "$busybox" ] || busybox=/proc/self/exe
for tool in awk cat chmod cp cut dd diff env find grep head ls mkdir mkfifo mv od ps rm sed seq \
    sleep sort tail tee touch tr uname uniq wc xargs; do
    eval "$tool() { $busybox $tool \"\$@\"; }"
done

failures=0
is() { # what got expected
    if [ "$2" = "$3" ]; then
        echo "ok  $1"
    else
        echo "FAIL $1: expected '$3', got '$2'"
        failures=$((failures + 1))
    fi
}

work=/tmp/busybox-test
rm -rf $work
mkdir -p $work/a/b/c
cd $work || exit 1

# Arithmetic, loops, functions, expansions.
sum=0
for number in $(seq 1 100); do sum=$((sum + number)); done
is "for and arithmetic" $sum 5050
count=0
while [ $count -lt 50 ]; do count=$((count + 1)); [ $count -eq 20 ] && break; done
is "while and break" $count 20
factorial() { if [ $1 -le 1 ]; then echo 1; else echo $(($1 * $(factorial $(($1 - 1))))); fi; }
is "a recursive function in subshells" "$(factorial 10)" 3628800
is "arithmetic operators" "$(((7 * 6 - 2) % 9 << 2 | 1))" 17
text=/usr/share/doc/file.tar.gz
is "expansions" "${text##*/} ${text%%.*} ${#text} ${none:-default}" "file.tar.gz /usr/share/doc/file 26 default"
case $text in *.tar.gz) kind=archive ;; *) kind=other ;; esac
is "case" $kind archive
set -- one "two words" three
is "positional parameters" "$# $2" "3 two words"
is "a subshell has its own variables" "$(count=5; (count=6); echo $count) $count" "5 20"
is "nested substitution" "$(echo $(echo $(echo deep)))" deep

# Pipes and here-documents.
is "a pipe of three" "$(printf 'b\na\nc\na\n' | sort | uniq | tr '\n' ' ')" "a b c "
is "a pipe of six" "$(seq 1 1000 | grep 7 | sed s/7/x/ | sort -r | head -n 3 | tail -n 1)" "x97"
is "the status of a pipe" "$(false | true; echo $?) $(true | false; echo $?)" "0 1"
is "a here-document" "$(cat <<END
sum $sum
$((1 + 1)) lines
END
)" "sum 5050
2 lines"
is "a quoted here-document" "$(cat <<'END'
$sum
END
)" '$sum'
is "a loop in a pipe" "$(seq 1 5 | while read line; do echo -n "<$line>"; done)" "<1><2><3><4><5>"
is "a pipe that ends early" "$(seq 1 100000 | head -n 1)" 1
is "much through a pipe" "$(dd if=/dev/zero bs=4096 count=500 2>/dev/null | wc -c)" 2048000
{ echo out; echo err >&2; } > both 2>&1
is "redirections" "$(cat both | tr '\n' ' ')" "out err "
exec 5> five; echo through five >&5; exec 5>&-
is "a descriptor of its own" "$(cat five)" "through five"
read first rest < five
is "read from a file" "$rest" five

# Jobs, wait, signals.
(sleep 0.1; echo late > late) &
wait $!
is "a background job and wait" "$(cat late)" late
(exit 7) & wait $!
is "the status of a job" $? 7
for job in 1 2 3 4 5; do (sleep 0.0$job; echo $job >> jobs) & done
wait
is "five jobs" "$(sort jobs | tr '\n' ' ')" "1 2 3 4 5 "
caught=0
trap 'caught=$((caught + 1))' USR1
kill -USR1 $$
kill -USR1 $$
is "trap" $caught 2
trap - USR1
sleep 50 & job=$!
kill $job; wait $job
is "kill and wait" $? 143
is "a trap at exit" "$(trap 'echo bye' EXIT; echo hello)" "hello
bye"
$busybox sh -c 'kill -SEGV $$' 2> /dev/null
is "a child that dies of a signal" $? 139
nothing-of-this-name 2> /dev/null
is "a command that is not there" $? 127
$busybox timeout 1 $busybox sleep 30
is "timeout" "$?" 143
mkfifo fifo 2> /dev/null && { echo through a fifo > fifo & is "a fifo" "$(cat fifo)" "through a fifo"; wait; }

# Files.
touch a/1 a/b/2 a/b/c/3
is "find" "$(find . -type f -path './a/*' | sort | tr '\n' ' ')" "./a/1 ./a/b/2 ./a/b/c/3 "
cp -r a copy; mv copy/1 copy/one
is "cp -r and mv" "$(ls copy | tr '\n' ' ')" "b one "
rm -r copy
is "rm -r" "$([ -e copy ] && echo there || echo gone)" gone
ln=$($busybox ln -s a/b link && cd link && $busybox pwd -P)
is "a symbolic link" "$ln" $work/a/b
chmod 640 five
is "chmod and ls" "$(ls -l five | cut -c1-10)" "-rw-r-----"
dd if=/dev/zero of=large bs=1024 count=300 2> /dev/null
is "dd and wc" "$(wc -c < large)" 307200
dd if=five of=large bs=1 seek=1000 conv=notrunc 2> /dev/null
is "dd seek" "$(dd if=large bs=1 skip=1000 count=12 2> /dev/null)" "through five"
seq 1 1000 > numbers
is "grep -c" "$(grep -c '^[0-9]*5$' numbers)" 100
is "sed" "$(sed -n '10,12{s/1/one/;p}' numbers | tr '\n' ' ')" "one0 one1 one2 "
is "awk" "$(awk '$1 % 2 == 0 { sum += $1; n++ } END { print n, sum, sum / n }' numbers)" "500 250500 501"
is "awk with arrays" "$(awk '{ c[length($1)]++ } END { print c[1], c[2], c[3], c[4] }' numbers)" "9 90 900 1"
is "sort -n and tail" "$(sort -rn numbers | tail -n 2 | tr '\n' ' ')" "2 1 "
is "xargs" "$(seq 1 100 | xargs -n 10 echo | wc -l)" 10
is "diff" "$(sed 500d numbers | diff numbers - | grep -c 500)" 1
is "tee" "$(echo twice | tee copy1) $(cat copy1)" "twice twice"
is "od" "$(printf 'AB' | od -An -tx1 | tr -d ' ')" 4142
for name in *; do :; done
is "globs" "$(echo f*)" "$(ls -d f* | tr '\n' ' ' | sed 's/ $//')"
is "test" "$([ -d a ] && [ -f five ] && [ ! -e none ] && [ large -nt /proc/version -o -s large ] && echo yes)" yes
is "du of a tree and rm" "$(mkdir -p t; for n in $(seq 1 200); do echo $n > t/$n; done; ls t | wc -l; rm -r t; ls -d t 2> /dev/null)" 200

# The system.
is "cat /proc/self/maps" "$($busybox cat /proc/self/maps | grep -c '\[stack\]')" 1
is "grep /proc/self/status" "$(grep -c -e '^Name:' -e '^VmRSS:' -e '^Threads:.1$' /proc/self/status)" 3
is "/proc/meminfo" "$(awk '/^MemTotal:/ { print ($2 > 1000) }' /proc/meminfo)" 1
is "ps" "$(ps | grep -c "^ *$$ ")" 1
is "/proc of the shell" "$(cat /proc/$$/stat | cut -d ' ' -f 1)" $$
is "uname" "$(uname -s)" Linux
is "env" "$(env -i A=1 $busybox env)" A=1
is "the environment" "$(B=two $busybox sh -c 'echo $B')" two
is "umask" "$(umask 077; touch private; ls -l private | cut -c1-10)" "-rw-------"
is "many processes" "$(n=0; while [ $n -lt 60 ]; do $busybox true && n=$((n + 1)); done; echo $n)" 60

cd /
rm -rf $work
[ $failures -eq 0 ] || echo "$failures failed"
exit $((failures != 0))
