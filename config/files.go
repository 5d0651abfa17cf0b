package config

import (
	_ "embed"
	"fmt"
	"path"
	"slices"
	"strings"
)

// fileRoots are the folders where machine.files may write: all else is
// read-only, or belongs to the node.
var fileRoots = []string{"/etc", "/run", "/var"}

// FilePlace is nil if machine.files may write a file at this absolute path. It
// doesn't look at links in it.
func FilePlace(name string) error {
	name = path.Clean(name)
	if !slices.ContainsFunc(fileRoots, func(root string) bool { return name != root && Within(name, root) }) {
		return fmt.Errorf("files can be written only in %s; everything else is read-only", strings.Join(fileRoots, ", "))
	}
	for place, instead := range tables().Reserved {
		if Within(name, place) {
			return fmt.Errorf("%s can't be replaced: %s", place, instead)
		}
	}
	return nil
}

// Within reports whether a path is dir or below it.
func Within(name, dir string) bool {
	return name == dir || strings.HasPrefix(name, strings.TrimSuffix(dir, "/")+"/")
}

func checkFiles(c *Config, r *report) {
	first := map[string]FileOp{}
	for i, f := range c.Machine.Files {
		where := at("machine", "files", i).with("path")
		if !path.IsAbs(f.Path) {
			continue
		}
		name := path.Clean(f.Path)
		r.refuse(where, FilePlace(name))
		if op, twice := first[name]; twice && (op != FileAppend || f.Op != FileAppend) {
			r.bad(where, "%s is also written by an earlier entry; only entries with op append can share a path", quote(f.Path))
		}
		for other := range first {
			if other != name && (Within(other, name) || Within(name, other)) {
				r.bad(where, "conflicts with %s of an earlier entry: one of them would have to be a directory", other)
				break // one example is enough
			}
		}
		first[name] = f.Op
	}
}

// SysctlPath is the path of a parameter below /proc/sys. The separator that comes
// first in the name separates its parts; the other one belongs to a part
// (sysctl.d(5)): net.ipv4.conf.eth0/7.forwarding, net/ipv4/conf/eth0.7/forwarding.
func SysctlPath(name string) string {
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '/' {
		return name
	}
	return strings.Map(func(r rune) rune {
		switch r {
		case '.':
			return '/'
		case '/':
			return '.'
		}
		return r
	}, name)
}

// sysctls are names of the kernel's parameters, but those of single links: more than a node has, and not all.
//
//go:embed sysctls.txt
var sysctls string

// warnSysctls: a link has one folder, and a dot in its name isn't a slash. What is almost the name of a parameter is
// mistyped.
func warnSysctls(c *Config, r *report) {
	known := strings.Fields(sysctls)
	for name := range c.Machine.Sysctls {
		path := SysctlPath(name)
		if best := Closest(path, known); best != "" && best != path {
			r.warn(at("machine", "sysctls", name), "there is hardly such a parameter; did you mean %s", strings.ReplaceAll(best, "/", "."))
		}
		// net/ipv4/conf/LINK/PARAMETER
		if parts := strings.Split(path, "/"); len(parts) > 5 && parts[0] == "net" && (parts[2] == "conf" || parts[2] == "neigh") {
			link, last := strings.Join(parts[3:len(parts)-1], "."), parts[len(parts)-1]
			r.warn(at("machine", "sysctls", name), "there is no such parameter; did you mean %s/%s/%s for the link %[2]s", strings.Join(parts[:3], "/"), link, last)
		}
	}
}
