// Package snapshot records everything that nodes could change on the machine on which they
// run, so that tests can compare the states before and after. Of a container node, it tells
// what this machine's kernel knows: processes, processor time and addresses.
package snapshot

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

// Snapshot is the state of a machine: for each aspect a set of lines. Processes
// and cgroups are only those of the given clusters, and loop devices only those
// with their files, because others change all the time.
type Snapshot map[Aspect][]string

// Aspect is one kind of state that a machine has.
type Aspect string

// The aspects.
const (
	Mounts    Aspect = "mount"
	Links     Aspect = "link"
	Addresses Aspect = "address or route"
	Settings  Aspect = "kernel setting"
	Modules   Aspect = "module"
	Hostname  Aspect = "hostname"
	Loops     Aspect = "loop device"
	Cgroups   Aspect = "cgroup"
	Processes Aspect = "process"
)

// Living are the aspects that running clusters change.
var Living = []Aspect{Cgroups, Processes, Loops}

// Take records the state of the machine and of these clusters.
func Take(t testing.TB, clusters ...string) Snapshot {
	t.Helper()
	s := Snapshot{}
	// First: on a machine with systemd, reading some settings mounts a file system.
	s[Settings] = settings()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	s[Mounts] = strings.Split(strings.TrimSpace(string(mounts)), "\n")
	// net/dev of this process: names of links; addresses and routes by their own files.
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		s[Links] = append(s[Links], l.Name())
	}
	for _, file := range []string{"route", "ipv6_route", "fib_trie", "if_inet6"} {
		if text, err := os.ReadFile("/proc/self/net/" + file); err == nil {
			for line := range strings.Lines(string(text)) {
				s[Addresses] = append(s[Addresses], withoutUses(file, line))
			}
		}
	}
	modules, _ := os.ReadFile("/proc/modules")
	for line := range strings.Lines(string(modules)) {
		name, _, _ := strings.Cut(line, " ")
		s[Modules] = append(s[Modules], name)
	}
	uts, _ := os.Hostname()
	s[Hostname] = []string{uts}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range backing {
		text, err := os.ReadFile(b)
		if err == nil && slices.ContainsFunc(clusters, func(c string) bool { return strings.Contains(string(text), "/"+c+"/") }) {
			s[Loops] = append(s[Loops], strings.TrimSpace(string(text)))
		}
	}
	for _, c := range clusters {
		s[Cgroups] = append(s[Cgroups], cgroups(c)...)
		s[Processes] = append(s[Processes], processes(c)...)
	}
	return s
}

// withoutUses removes the numbers of references and uses from a route of IPv6:
// each connection changes them (net/ipv6/route.c, rt6_info_route).
func withoutUses(file, line string) string {
	fields := strings.Fields(line)
	const references, uses = 6, 7
	if file != "ipv6_route" || len(fields) <= uses {
		return strings.TrimSpace(line)
	}
	return strings.Join(slices.Delete(fields, references, uses+1), " ")
}

// moving settings change by themselves: counters, random numbers, and what the
// kernel adapts. (proc_sys(5), Documentation/admin-guide/sysctl)
var moving = regexp.MustCompile(`/(random/(uuid|entropy_avail|boot_id)|fs/(file-nr|inode-nr|inode-state|dentry-state|aio-nr|quota/.*)|` +
	`kernel/(ns_last_pid|hung_task_detect_count|pty/nr|sched_domain/.*|random/.*|keys/.*|perf_.*)|net/netfilter/nf_conntrack_count|` +
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
		if err == nil && d.IsDir() && strings.Contains(path, "/garboard/"+cluster+".") {
			all = append(all, path)
		}
		return nil
	})
	return all
}

// processes are those with the cluster's name in their arguments, as in QEMU's
// machine name, or in its cgroup.
func processes(cluster string) []string {
	var all []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue // a test may name its clusters in its own arguments
		}
		args, _ := os.ReadFile(dir + "/cmdline")
		in, _ := os.ReadFile(dir + "/cgroup")
		words := strings.Split(string(args), "\x00")
		named := func(word string) bool { return word == cluster || strings.HasPrefix(word, cluster+"/") }
		if slices.ContainsFunc(words, named) || strings.Contains(string(in), "/garboard/"+cluster+".") {
			all = append(all, fmt.Sprintf("%s %q", dir, words))
		}
	}
	return all
}

// Diff returns what was added and removed, except for some aspects; "" for no difference.
func (s Snapshot) Diff(now Snapshot, but ...Aspect) string {
	aspects := map[Aspect]bool{}
	for _, of := range []Snapshot{s, now} {
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
			out = append(out, "- "+string(a)+" "+line)
		}
		for _, line := range missing(now[a], s[a]) {
			out = append(out, "+ "+string(a)+" "+line)
		}
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// missing returns the lines of a that are not in b.
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
