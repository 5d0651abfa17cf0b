package oci

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/image/progress"
	"github.com/garboard-os/garboard/kernel/deb"
)

// AptPackages are the Debian packages that making the images needs on the build machine.
var AptPackages = deb.AptPackages

// tool is a file of the node tools: what the kubelet, kube-proxy and flannel call when they mount, format, check and filter.
type tool struct {
	Package string
	Name    string // of a program, or with a slash of any file or directory in the package
	Links   []string
	Why     string
}

var tools = []tool{
	{"mount", "mount", nil, "volumes"},
	{"mount", "umount", nil, "volumes"},
	{"mount", "losetup", nil, "block volumes"},
	{"util-linux", "findmnt", nil, "shows mounts"},
	{"util-linux", "nsenter", nil, "storage drivers enter the host's mount namespace"},
	{"util-linux", "lsblk", nil, "storage drivers look for disks"},
	{"util-linux", "blkid", nil, "which file system a disk has, before it is formatted"},
	{"util-linux", "blockdev", nil, "sizes, before a file system is grown"},
	{"util-linux", "fsck", nil, "checks before mounting, and calls fsck.TYPE"},
	{"e2fsprogs", "mke2fs", []string{"mkfs.ext2", "mkfs.ext3", "mkfs.ext4"}, "formats ext4 volumes"},
	{"e2fsprogs", "e2fsck", []string{"fsck.ext2", "fsck.ext3", "fsck.ext4"}, "checks them"},
	{"e2fsprogs", "resize2fs", nil, "grows them"},
	{"e2fsprogs", "dumpe2fs", nil, "whether one needs to grow"},
	{"e2fsprogs", "tune2fs", nil, "quotas on ext4"},
	{"e2fsprogs", "etc/mke2fs.conf", nil, "Debian's defaults for ext4"},
	{"xfsprogs", "mkfs.xfs", nil, "formats xfs volumes"},
	{"xfsprogs", "xfs_repair", nil, "checks them"},
	{"xfsprogs", "xfs_growfs", nil, "grows them"},
	{"xfsprogs", "xfs_io", nil, "whether one needs to grow"},
	{"xfsprogs", "xfs_quota", nil, "project quotas of ephemeral storage"},
	{"coreutils", "true", []string{"fsck.xfs"}, "xfs is checked by mounting it; Debian's own fsck.xfs is a shell script that says so"},
	{"coreutils", "cp", nil, "flannel's published manifest copies its CNI configuration with it"},
	{"nfs-common", "mount.nfs", []string{"mount.nfs4", "umount.nfs", "umount.nfs4"}, "NFS volumes"},
	{"libtirpc-common", "etc/netconfig", nil, "mount.nfs finds out from it what UDP and TCP are"},
	{"netbase", "etc/protocols", nil, "names of protocols, for iptables and mount.nfs"},
	{"netbase", "etc/services", nil, "names of ports, for iptables and nft"},
	{"nftables", "nft", nil, "kube-proxy and flannel in nftables mode"},
	{"iptables", "xtables-nft-multi", []string{
		"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore",
		"iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore",
	}, "kubelet's hint chain, kube-proxy in iptables mode, rules left by either"},
	{"iptables", "usr/lib/x86_64-linux-gnu/xtables", nil, "iptables loads its matches and targets from here"},
	{"conntrack", "conntrack", nil, "kube-proxy drops stale UDP flows"},
	{"libgcc-s1", "libgcc_s.so.1", nil, "glibc loads it when a thread ends"},
	{"ca-certificates", "usr/share/ca-certificates/mozilla", nil, "becomes the bundle"},
}

const (
	toolsStep = "node tools"

	// In the result: the tree of the layer, and the bundle of certificate authorities, which all images have.
	toolTree = "tree"
	caBundle = "ca-certificates.crt"

	caFolder      = "usr/share/ca-certificates/mozilla"
	libraryFolder = "usr/lib/x86_64-linux-gnu"
	aptLists      = "/var/lib/apt/lists"
)

var (
	programFolders = []string{"bin", "sbin", "usr/bin", "usr/sbin"}
	libraryFolders = []string{"lib/x86_64-linux-gnu", libraryFolder, "lib64", "usr/lib64"}
)

// nodeTools returns the directory with the tools, made from the packages that apt would install today.
func nodeTools(ctx context.Context, store *cache.Store, r *progress.Reporter) (string, error) {
	packages, err := resolveTools(ctx, store)
	if err != nil {
		return "", fmt.Errorf("resolve node tools: %w", err)
	}
	source, err := recipe("tools.go")
	if err != nil {
		return "", err
	}
	inputs := []string{source}
	for _, p := range packages {
		inputs = append(inputs, p.Key())
	}
	return store.Build(ctx, "node-tools", inputs, func(ctx context.Context, dir string) error {
		done := r.Step(toolsStep)
		err := fetchTools(ctx, packages, dir)
		done(err)
		return err
	})
}

// resolveTools finds the packages of the tools, with the libraries that they depend on. Asking apt takes seconds, so that its answer is kept
// for as long as its lists are the same.
func resolveTools(ctx context.Context, store *cache.Store) ([]deb.Package, error) {
	var names []string
	for _, t := range tools {
		names = append(names, t.Package)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	state, err := listsState(aptLists)
	if err != nil {
		return nil, err
	}
	dir, err := store.Build(ctx, "node-tools-packages", append([]string{state}, names...), func(ctx context.Context, dir string) error {
		// What else they depend on is for maintainer scripts, and for scripts that don't come along.
		isLibrary := func(name string) bool { return strings.HasPrefix(name, "lib") }
		packages, err := deb.Closure(ctx, isLibrary, names...)
		if err != nil {
			return err
		}
		slices.SortFunc(packages, func(a, b deb.Package) int { return strings.Compare(a.Name, b.Name) })
		answer, err := json.Marshal(packages)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "packages.json"), answer, 0o644)
	})
	if err != nil {
		return nil, err
	}
	answer, err := os.ReadFile(filepath.Join(dir, "packages.json"))
	if err != nil {
		return nil, err
	}
	var packages []deb.Package
	if err := json.Unmarshal(answer, &packages); err != nil {
		return nil, fmt.Errorf("read %s: %w", dir, err)
	}
	return packages, nil
}

// listsState changes whenever apt-get update has changed what apt knows.
func listsState(dir string) (string, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	var state strings.Builder
	for _, f := range files {
		info, err := f.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		if info.Mode().IsRegular() && f.Name() != "lock" {
			fmt.Fprintln(&state, f.Name(), info.Size(), info.ModTime().UnixNano())
		}
	}
	return state.String(), nil
}

// fetchTools leaves the tools, the libraries that they load, and the bundle of certificate authorities in dir.
func fetchTools(ctx context.Context, packages []deb.Package, dir string) error {
	unpacked, err := os.MkdirTemp(dir, ".unpacked-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unpacked)
	if err := deb.Fetch(ctx, unpacked, packages...); err != nil {
		return err
	}
	p := picker{from: unpacked, to: filepath.Join(dir, toolTree), taken: map[string]bool{}}
	for _, t := range tools {
		if err := p.tool(t); err != nil {
			return fmt.Errorf("take %s out of %s: %w", t.Name, t.Package, err)
		}
	}
	return bundle(filepath.Join(unpacked, caFolder), filepath.Join(dir, caBundle))
}

// picker copies files from unpacked packages into the layout with one /usr, and whatever libraries their ELF headers ask for.
type picker struct {
	from, to string
	taken    map[string]bool // base names of the libraries that are there already
}

func (p *picker) tool(t tool) error {
	switch {
	case t.Name == caFolder:
		return nil
	case strings.HasPrefix(t.Name, "etc/"):
		return copyFile(filepath.Join(p.from, t.Name), filepath.Join(p.to, t.Name), 0o644)
	case strings.Contains(t.Name, "/"):
		return p.folder(t.Name)
	case strings.Contains(t.Name, ".so"):
		return p.library(t.Name)
	}
	for _, folder := range programFolders {
		source := filepath.Join(p.from, folder, t.Name)
		if _, err := os.Stat(source); err != nil {
			continue
		}
		target := path.Join("usr", path.Base(folder))
		if err := p.object(source, path.Join(target, t.Name), 0o755); err != nil {
			return err
		}
		for _, name := range t.Links {
			if err := os.Symlink(t.Name, filepath.Join(p.to, target, name)); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("in none of %s: %w", strings.Join(programFolders, ", "), fs.ErrNotExist)
}

// folder takes all files of a folder of plug-ins.
func (p *picker) folder(name string) error {
	files, err := os.ReadDir(filepath.Join(p.from, name))
	if err != nil {
		return err
	}
	for _, f := range files {
		source := filepath.Join(p.from, name, f.Name())
		if f.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(source)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Join(p.to, name), 0o755); err != nil {
				return err
			}
			if err := os.Symlink(target, filepath.Join(p.to, name, f.Name())); err != nil {
				return err
			}
			continue
		}
		if err := p.object(source, path.Join(name, f.Name()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// library takes a library by the name that ELF headers call it.
func (p *picker) library(name string) error {
	if p.taken[name] {
		return nil
	}
	p.taken[name] = true
	for _, folder := range libraryFolders {
		// Stat follows the link from libx.so.1 to libx.so.1.2.3. The copy is a file with the former name, the only one that is asked for.
		source := filepath.Join(p.from, folder, name)
		if _, err := os.Stat(source); err != nil {
			continue
		}
		if !strings.HasPrefix(name, "ld-linux") {
			return p.object(source, path.Join(libraryFolder, name), 0o644)
		}
		// Programs name the dynamic linker by its path in /lib64, and it is executable.
		if err := p.object(source, path.Join(libraryFolder, name), 0o755); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(p.to, "usr/lib64"), 0o755); err != nil {
			return err
		}
		return os.Symlink("../lib/x86_64-linux-gnu/"+name, filepath.Join(p.to, "usr/lib64", name))
	}
	return fmt.Errorf("library %s is in no package: %w", name, fs.ErrNotExist)
}

// object copies a program or library, and takes what it needs.
func (p *picker) object(source, target string, perm fs.FileMode) error {
	needs, err := needed(source)
	if err != nil {
		return fmt.Errorf("read %s: %w", path.Base(source), err)
	}
	if err := copyFile(source, filepath.Join(p.to, target), perm); err != nil {
		return err
	}
	for _, name := range needs {
		if err := p.library(name); err != nil {
			return fmt.Errorf("%s: %w", path.Base(source), err)
		}
	}
	return nil
}

// needed lists the libraries and the dynamic linker that an ELF file names.
func needed(file string) ([]string, error) {
	object, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer object.Close()
	names, err := object.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	if section := object.Section(".interp"); section != nil {
		interpreter, err := section.Data()
		if err != nil {
			return nil, err
		}
		names = append(names, path.Base(strings.TrimRight(string(interpreter), "\x00")))
	}
	return names, nil
}

// bundle joins certificate authorities into the one file that programs read.
func bundle(folder, file string) error {
	certificates, err := filepath.Glob(filepath.Join(folder, "*.crt"))
	if err != nil {
		return err
	}
	if len(certificates) == 0 {
		return fmt.Errorf("no certificate authorities in %s", folder)
	}
	slices.Sort(certificates)
	var all []byte
	for _, name := range certificates {
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		all = append(all, strings.TrimSpace(string(content))+"\n"...)
	}
	return os.WriteFile(file, all, 0o644)
}

func copyFile(from, to string, perm fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, perm)
}
