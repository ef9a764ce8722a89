// Goroutines that build trees, maps and slices for the garbage collector, which runs beside them.
// The first argument is the number of nodes of each worker, the second how many workers there are.

package main

import (
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"sort"
	"strconv"
)

type node struct {
	left, right *node
	key         uint64
	text        string
}

type random uint64

func (r *random) next() uint64 {
	*r ^= *r << 13
	*r ^= *r >> 7
	*r ^= *r << 17
	return uint64(*r)
}

func (n *node) insert(key uint64, text string) *node {
	if n == nil {
		return &node{key: key, text: text}
	}
	if key < n.key {
		n.left = n.left.insert(key, text)
	} else {
		n.right = n.right.insert(key, text)
	}
	return n
}

func (n *node) walk(visit func(*node)) {
	if n != nil {
		n.left.walk(visit)
		visit(n)
		n.right.walk(visit)
	}
}

func work(worker, nodes int) string {
	r := random(88172645463325252 + worker)
	hash := fnv.New64a()
	var root *node
	byText := make(map[string]uint64)
	for at := 0; at < nodes; at++ {
		key := r.next()
		text := strconv.FormatUint(key, 36) + "-" + strconv.Itoa(at) + string(make([]byte, key%64))
		root = root.insert(key, text)
		byText[text] = key
	}
	var keys []uint64
	root.walk(func(n *node) {
		keys = append(keys, n.key^byText[n.text])
		fmt.Fprint(hash, n.text)
	})
	sort.Slice(keys, func(a, b int) bool { return keys[a] < keys[b] })
	for text, key := range byText {
		if key%3 == 0 {
			delete(byText, text)
		}
	}
	root.walk(func(n *node) {
		if n.key%3 != 0 && byText[n.text] != n.key {
			panic("a key was lost")
		}
	})
	fmt.Fprint(hash, len(byText), len(keys), keys[len(keys)/2])
	return fmt.Sprint(worker, hash.Sum64())
}

func main() {
	nodes, _ := strconv.Atoi(os.Args[1])
	workers, _ := strconv.Atoi(os.Args[2])
	results := make(chan string)
	for worker := 0; worker < workers; worker++ {
		go func(worker int) { results <- work(worker, nodes) }(worker)
	}
	var all []string
	for range make([]int, workers) {
		all = append(all, <-results)
	}
	sort.Strings(all)
	hash := fnv.New64a()
	fmt.Fprint(hash, all)
	var statistics runtime.MemStats
	runtime.ReadMemStats(&statistics)
	if statistics.NumGC == 0 {
		panic("no garbage was collected")
	}
	fmt.Printf("answer %016x\n", hash.Sum64())
}
