package qemu

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

// A snapshot is what a cluster could change about its host. Processes, cgroups
// and loop devices are only those of one cluster, as other things come and go.
type snapshot map[aspect][]string

type aspect int

const (
	mounts aspect = 1 << iota
	links
	sysctls
	cgroups
	processes
	loops

	everything = mounts | links | sysctls | cgroups | processes | loops
	whileUp    = mounts | links | sysctls
)

func takeSnapshot(t *testing.T, cluster string) snapshot {
	t.Helper()
	s := snapshot{
		sysctls:   readSysctls(),
		cgroups:   findCgroups(cluster),
		processes: findProcesses(cluster),
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	s[mounts] = strings.Split(string(mountinfo), "\n")
	devices, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		s[links] = append(s[links], d.Name())
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range backing {
		if text, err := os.ReadFile(b); err == nil && strings.Contains(string(text), filepath.Dir(built.Rootfs)) {
			s[loops] = append(s[loops], string(text))
		}
	}
	return s
}

// volatile sysctls change by themselves.
var volatile = regexp.MustCompile(`/(random/|.*-nr$|.*-state$|.*_count$|ns_last_pid$|pty/nr$|.*inode.*|.*dentry.*|.*cost.*|.*bpf_stats.*|cad_pid$)`)

func readSysctls() []string {
	var all []string
	_ = filepath.WalkDir("/proc/sys", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || volatile.MatchString(path) {
			return nil
		}
		// What can't be written only counts something.
		if info, err := d.Info(); err != nil || info.Mode()&0o200 == 0 {
			return nil
		}
		if text, err := os.ReadFile(path); err == nil {
			all = append(all, path+" = "+strings.TrimSpace(string(text)))
		}
		return nil
	})
	return all
}

func findCgroups(cluster string) []string {
	var all []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/garboard/"+cluster) {
			all = append(all, path)
		}
		return nil
	})
	return all
}

// findProcesses finds what carries the cluster's name in its arguments, or is in
// its cgroup.
func findProcesses(cluster string) []string {
	var all []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		args, _ := os.ReadFile(dir + "/cmdline")
		in, _ := os.ReadFile(dir + "/cgroup")
		if strings.Contains(string(args), cluster) || strings.Contains(string(in), "/garboard/"+cluster) {
			all = append(all, fmt.Sprintf("%s %q", dir, args))
		}
	}
	return all
}

// diff says what differs in the aspects.
func (s snapshot) diff(now snapshot, which aspect) string {
	var out []string
	for a := mounts; a <= loops; a <<= 1 {
		if which&a == 0 {
			continue
		}
		for _, line := range s[a] {
			if !slices.Contains(now[a], line) {
				out = append(out, "- "+line)
			}
		}
		for _, line := range now[a] {
			if !slices.Contains(s[a], line) {
				out = append(out, "+ "+line)
			}
		}
	}
	return strings.Join(out, "\n")
}

// removeAtEnd are directories that all tests share.
var removeAtEnd []string
