package rootfs

import (
	"context"
	"debug/elf"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/kernel/deb"
)

// AptPackages are what the build machine must have installed for FetchTools to work. The tools themselves are only unpacked.
var AptPackages = deb.AptPackages

// tool is a file that comes from a Debian package, because writing it anew in Go would be folly.
type tool struct {
	Package string
	Name    string // base name of the program or library
	Why     string
}

var tools = []tool{
	{"xfsprogs", "mkfs.xfs", "making STATE and EPHEMERAL"},
	{"xfsprogs", "xfs_growfs", "growing EPHEMERAL with its disk"},
	{"xfsprogs", "xfs_repair", "a filesystem whose log can't be replayed"},
	{"e2fsprogs", "mke2fs", "data disks with ext4"},
	{"cryptsetup-bin", "cryptsetup", "LUKS2 headers"},
	{"nftables", "nft", "the portmap plugin (hostPort) calls it"},
	{"libgcc-s1", "libgcc_s.so.1", "glibc loads it when a thread ends: cryptsetup aborts without"},
}

const (
	caPackage = "ca-certificates"
	// caFolder is where its certificates lie, one per file.
	caFolder = "usr/share/ca-certificates/mozilla"
	// caBundle is the path that acceptance S-140 gives.
	caBundle = "etc/ssl/certs/ca-certificates"
	// libraryFolder is where Debian's dynamic linker looks without a cache file.
	libraryFolder = "usr/lib/x86_64-linux-gnu"
)

// ToolNames lists the tools, for a build cache's key.
func ToolNames() []string {
	var names []string
	for _, t := range tools {
		names = append(names, t.Name)
	}
	return names
}

// ResolveTools finds the packages that the tools and their libraries come from.
func ResolveTools(ctx context.Context) ([]deb.Package, error) {
	names := []string{caPackage}
	for _, t := range tools {
		names = append(names, t.Package)
	}
	slices.Sort(names)
	// What else they depend on is for their maintainer scripts, and for scripts that don't come along.
	isLibrary := func(name string) bool { return strings.HasPrefix(name, "lib") || name == "zlib1g" }
	packages, err := deb.Closure(ctx, isLibrary, slices.Compact(names)...)
	if err != nil {
		return nil, fmt.Errorf("tools of the root filesystem: %w", err)
	}
	return packages, nil
}

// FetchTools leaves in dir, laid out as on a node, the tools with exactly the libraries that they load, and the bundle of certificate
// authorities. packages is what ResolveTools found.
func FetchTools(ctx context.Context, packages []deb.Package, dir string) error {
	unpacked, err := os.MkdirTemp(dir, ".unpacked-")
	if err != nil {
		return fmt.Errorf("fetch tools: %w", err)
	}
	defer os.RemoveAll(unpacked)
	if err := deb.Fetch(ctx, unpacked, packages...); err != nil {
		return fmt.Errorf("fetch tools: %w", err)
	}
	if err := takeTools(unpacked, dir, ToolNames()); err != nil {
		return fmt.Errorf("fetch tools: %w", err)
	}
	if err := takeAuthorities(filepath.Join(unpacked, caFolder), filepath.Join(dir, caBundle)); err != nil {
		return fmt.Errorf("fetch certificate authorities: %w", err)
	}
	return nil
}

// takeTools copies the tools, and whatever the ELF headers of what it copied ask for.
func takeTools(unpacked, dir string, names []string) error {
	index, err := indexFiles(unpacked)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for queue := slices.Clone(names); len(queue) > 0; queue = queue[1:] {
		name := queue[0]
		if seen[name] {
			continue
		}
		seen[name] = true
		from, ok := index[name]
		if !ok {
			return fmt.Errorf("no package holds %s", name)
		}
		needs, err := place(from, name, dir)
		if err != nil {
			return err
		}
		queue = append(queue, needs...)
	}
	return nil
}

// place copies one program or library to its folder, and gives back the names of the libraries that it needs.
func place(from, name, dir string) ([]string, error) {
	object, err := elf.Open(from)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	defer object.Close()
	needs, err := object.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	folder, perm := "usr/sbin", fs.FileMode(0o755)
	if strings.Contains(name, ".so") {
		folder, perm = libraryFolder, 0o644
	}
	if strings.HasPrefix(name, "ld-linux") {
		// Programs name it by this path. The linker itself is executable, as Debian has it.
		perm = 0o755
		alias := filepath.Join(dir, "usr/lib64", name)
		if err := os.MkdirAll(filepath.Dir(alias), 0o755); err != nil {
			return nil, err
		}
		if err := os.Symlink(path.Join("..", strings.TrimPrefix(libraryFolder, "usr/"), name), alias); err != nil {
			return nil, err
		}
	}
	if interpreter := interpreter(object); interpreter != "" {
		needs = append(needs, path.Base(interpreter))
	}
	to := filepath.Join(dir, folder, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return nil, err
	}
	return needs, Entry{From: from, Mode: perm}.lay(to)
}

// interpreter is the dynamic linker that a program asks the kernel for.
func interpreter(object *elf.File) string {
	section := object.Section(".interp")
	if section == nil {
		return ""
	}
	data, err := section.Data()
	if err != nil {
		return ""
	}
	return strings.TrimRight(string(data), "\x00")
}

// indexFiles finds files by base name in the folders of a package tree where programs and libraries lie. Libraries are asked for by
// the name of a link (libc.so.6): links are followed.
func indexFiles(unpacked string) (map[string]string, error) {
	index := map[string]string{}
	for _, folder := range []string{"bin", "sbin", "usr/bin", "usr/sbin", "lib/x86_64-linux-gnu", "lib64", libraryFolder, "usr/lib64"} {
		entries, err := os.ReadDir(filepath.Join(unpacked, folder))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			name := filepath.Join(unpacked, folder, e.Name())
			// An absolute link leads out of the tree, to the build machine's own files, which aren't what was verified.
			if target, err := os.Readlink(name); err == nil && path.IsAbs(target) {
				name = filepath.Join(unpacked, target)
			}
			if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() {
				index[e.Name()] = name
			}
		}
	}
	return index, nil
}

// takeAuthorities joins the certificates of the package into one bundle, which is what its maintainer script would do.
func takeAuthorities(folder, bundle string) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.crt"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("no certificates in %s", caFolder)
	}
	slices.Sort(files)
	var joined []byte
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if block, _ := pem.Decode(data); block == nil || block.Type != "CERTIFICATE" {
			return fmt.Errorf("%s holds no certificate", filepath.Base(file))
		}
		joined = append(joined, data...)
	}
	if err := os.MkdirAll(filepath.Dir(bundle), 0o755); err != nil {
		return err
	}
	return Entry{Text: string(joined), Mode: 0o644}.lay(bundle)
}
