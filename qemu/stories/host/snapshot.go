//go:build story

package host

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A snapshot is what nodes could change about their host: every aspect as a set
// of lines. Processes and cgroups are only those of the story's clusters, and
// loop devices those with its root filesystem, as other things come and go.
type snapshot map[string][]string

// aspects that clusters have while they are up.
var living = []string{"cgroup", "process", "loop device"}

func take(t *testing.T, rootfs string, clusters ...string) snapshot {
	t.Helper()
	s := snapshot{}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	s["mount"] = strings.Split(strings.TrimSpace(string(mounts)), "\n")
	// net/dev of this process: names of links; addresses and routes by their own files.
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		s["link"] = append(s["link"], l.Name())
	}
	for _, file := range []string{"route", "ipv6_route", "fib_trie", "if_inet6"} {
		if text, err := os.ReadFile("/proc/self/net/" + file); err == nil {
			s["address or route"] = append(s["address or route"], strings.Split(string(text), "\n")...)
		}
	}
	s["kernel setting"] = settings()
	modules, _ := os.ReadFile("/proc/modules")
	for line := range strings.Lines(string(modules)) {
		name, _, _ := strings.Cut(line, " ")
		s["module"] = append(s["module"], name)
	}
	uts, _ := os.Hostname()
	s["hostname"] = []string{uts}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range backing {
		if text, err := os.ReadFile(b); err == nil && strings.TrimSpace(string(text)) == rootfs {
			s["loop device"] = append(s["loop device"], b)
		}
	}
	for _, c := range clusters {
		s["cgroup"] = append(s["cgroup"], cgroups(c)...)
		s["process"] = append(s["process"], processes(c)...)
	}
	return s
}

// moving settings change by themselves: counters, random numbers, and what the
// kernel adapts. (proc_sys(5), Documentation/admin-guide/sysctl)
var moving = regexp.MustCompile(`/(random/(uuid|entropy_avail|boot_id)|fs/(file-nr|inode-nr|inode-state|dentry-state|aio-nr|quota/.*)|` +
	`kernel/(ns_last_pid|pty/nr|sched_domain/.*|random/.*|keys/.*|perf_.*)|net/netfilter/nf_conntrack_count|` +
	`net/ipv4/neigh/.*|debug/.*|sunrpc/.*)$`)

// settings are all below /proc/sys that can be read.
func settings() []string {
	var all []string
	_ = filepath.WalkDir("/proc/sys", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || moving.MatchString(path) {
			return nil
		}
		if text, err := os.ReadFile(path); err == nil {
			all = append(all, path+" = "+strings.TrimSpace(string(text)))
		}
		return nil
	})
	return all
}

func cgroups(cluster string) []string {
	var all []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path+"/", "/garboard/"+cluster+"/") {
			all = append(all, path)
		}
		return nil
	})
	return all
}

// processes are those that carry the cluster's name in their arguments, or are in
// its cgroup.
func processes(cluster string) []string {
	var all []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		args, _ := os.ReadFile(dir + "/cmdline")
		in, _ := os.ReadFile(dir + "/cgroup")
		words := strings.Split(string(args), "\x00")
		if slices.Contains(words, cluster) || strings.Contains(string(in), "/garboard/"+cluster+"/") {
			all = append(all, fmt.Sprintf("%s %q", dir, words))
		}
	}
	return all
}

// diff says what has come and gone, but for some aspects.
func (s snapshot) diff(now snapshot, but ...string) string {
	aspects := map[string]bool{}
	for _, of := range []snapshot{s, now} {
		for a := range of {
			aspects[a] = !slices.Contains(but, a)
		}
	}
	var out []string
	for a, compared := range aspects {
		if !compared {
			continue
		}
		for _, line := range missing(s[a], now[a]) {
			out = append(out, "- "+a+" "+line)
		}
		for _, line := range missing(now[a], s[a]) {
			out = append(out, "+ "+a+" "+line)
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// missing are the lines of a that b hasn't.
func missing(a, b []string) []string {
	have := make(map[string]bool, len(b))
	for _, line := range b {
		have[line] = true
	}
	var out []string
	for _, line := range a {
		if !have[line] {
			out = append(out, line)
		}
	}
	return out
}
