// Package initramfs writes the archive that the kernel unpacks into its first root filesystem.
//
// It holds as little as can mount the real root filesystem, and that filesystem itself:
//
//	/init                        PID 1; stage 1 binds it over its place in the root filesystem
//	/usr/lib/modules/<release>/  the modules that stage 1 loads, a modules.dep for just these, and modules.builtin
//	/rootfs.sqsh                 the root filesystem, to be mounted through a loop device
//
// and mountpoints. The archive has two segments, which the kernel unpacks one after the other
// (Documentation/driver-api/early-userspace/buffer-format.rst): the first, everything small, is compressed with zstd;
// the second, the root filesystem, is stored as it is, since it is compressed already and a second decompressor would
// only cost time. Nothing in the archive depends on when, where or by whom it was built.
package initramfs

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot/esp"
	"github.com/u-root/u-root/pkg/cpio"
)

// AptPackages are what the build machine must have installed for Write to work.
var AptPackages = []string{"zstd"}

// Contents is what goes into an initramfs.
type Contents struct {
	// Init is the path of the program that becomes /init.
	Init string
	// RootFS is the path of the squashfs image that becomes /rootfs.sqsh.
	RootFS string
	// ModulesDir is a module folder with a modules.dep, named after the kernel's release; empty for none.
	ModulesDir string
}

// Modules are what stage 1 loads, by name: enough for a root filesystem that is a file, with an overlay on it.
var Modules = []string{"loop", "squashfs", "overlay"}

const (
	// RootFSName is where stage 1 finds the root filesystem.
	RootFSName = "rootfs.sqsh"
	// level is zstd's highest with a window of 8 MiB, which is what the kernel allocates to unpack. The Go encoder's
	// best is 12 % larger, which is why the program is called.
	level = "-19"
	// alignment is where the kernel looks for the next segment of the archive.
	alignment = 4
)

// directories exist before anything is mounted.
var directories = []string{"dev", "proc", "sys", "run", "root", "usr", "usr/lib", "usr/lib/modules"}

// Write writes the archive for c.
func Write(ctx context.Context, w io.Writer, c Contents) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write initramfs: %w", err)
		}
	}()
	program, err := os.ReadFile(c.Init)
	if err != nil {
		return err
	}
	var modules read
	if c.ModulesDir != "" {
		modules = func(name string) ([]byte, error) { return os.ReadFile(filepath.Join(c.ModulesDir, name)) }
	}
	small, err := smallFiles(program, filepath.Base(c.ModulesDir), modules)
	if err != nil {
		return err
	}
	first, err := compressed(ctx, small)
	if err != nil {
		return err
	}
	rootfs, err := os.Open(c.RootFS)
	if err != nil {
		return err
	}
	defer rootfs.Close()
	return writeArchive(w, first, rootfs)
}

// writeArchive writes both segments, of which the first one is compressed.
func writeArchive(w io.Writer, first []byte, rootfs *os.File) error {
	// The kernel skips zeros between segments.
	padding := (alignment - len(first)%alignment) % alignment
	if _, err := w.Write(append(bytes.Clone(first), make([]byte, padding)...)); err != nil {
		return err
	}
	stat, err := rootfs.Stat()
	if err != nil {
		return err
	}
	// It is read while it is written.
	record := cpio.StaticFile(RootFSName, "", 0o400)
	record.ReaderAt, record.FileSize = rootfs, uint64(stat.Size())
	return writeSegment(w, []cpio.Record{record})
}

// read reads a file of a module folder.
type read = func(name string) ([]byte, error)

// smallFiles lists the compressed segment. Modules are those of a release of the kernel, or nil.
func smallFiles(program []byte, release string, modules read) ([]cpio.Record, error) {
	var records []cpio.Record
	for _, dir := range directories {
		records = append(records, cpio.Directory(dir, 0o755))
	}
	// The devices bridge the time until PID 1 mounts devtmpfs: the kernel opens the console for it, and Go's runtime
	// opens null in place of standard files that are missing.
	records = append(records,
		cpio.Symlink("lib", "usr/lib"),
		cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.CharDev("dev/null", 0o666, 1, 3),
	)
	records = append(records, cpio.StaticFile(esp.InitName, string(program), 0o755))
	if modules == nil {
		return records, nil
	}
	added, err := moduleRecords(modules, release, Modules)
	return append(records, added...), err
}

// moduleRecords picks the named modules and what they need from a module folder, and the lines of modules.dep that say
// so. Names without a file are built into the kernel: package kernel has made sure that each is one or the other.
func moduleRecords(dir read, release string, names []string) ([]cpio.Record, error) {
	index, err := dir("modules.dep")
	if err != nil {
		return nil, err
	}
	lines := map[string]string{}  // by module file
	deps := map[string][]string{} // by module file
	byName := map[string]string{} // module file by name
	for line := range strings.Lines(string(index)) {
		path, needs, _ := strings.Cut(strings.TrimSpace(line), ":")
		lines[path], deps[path] = line, strings.Fields(needs)
		name := strings.TrimSuffix(filepath.Base(path), ".ko")
		byName[strings.ReplaceAll(name, "-", "_")] = path
	}
	taken := map[string]bool{}
	for _, name := range names {
		if path, ok := byName[name]; ok {
			taken[path] = true
			for _, dep := range deps[path] {
				taken[dep] = true
			}
		}
	}

	base := filepath.Join("usr/lib/modules", release)
	folders := map[string]bool{base: true}
	var files []cpio.Record
	var dep strings.Builder
	for _, path := range slices.Sorted(maps.Keys(taken)) {
		dep.WriteString(lines[path])
		for parent := filepath.Dir(path); parent != "."; parent = filepath.Dir(parent) {
			folders[filepath.Join(base, parent)] = true
		}
		record, err := contents(dir, base, path)
		if err != nil {
			return nil, err
		}
		files = append(files, record)
	}
	files = append(files, cpio.StaticFile(filepath.Join(base, "modules.dep"), dep.String(), 0o644))
	builtin, err := contents(dir, base, "modules.builtin")
	if err != nil {
		return nil, err
	}
	files = append(files, builtin)

	var records []cpio.Record
	for _, folder := range slices.Sorted(maps.Keys(folders)) { // parents sort before their children
		records = append(records, cpio.Directory(folder, 0o755))
	}
	return append(records, files...), nil
}

// contents is a record with a small file's bytes.
func contents(dir read, base, name string) (cpio.Record, error) {
	data, err := dir(name)
	return cpio.StaticFile(filepath.Join(base, name), string(data), 0o644), err
}

// writeSegment writes one complete cpio archive. Its length is a multiple of alignment.
func writeSegment(w io.Writer, records []cpio.Record) error {
	cpio.MakeAllReproducible(records)
	for i := range records {
		// Each file its own inode, or the kernel takes them for hard links of one.
		records[i].Ino = uint64(i + 1)
	}
	archive := cpio.Newc.Writer(w)
	if err := cpio.WriteRecords(archive, records); err != nil {
		return err
	}
	return cpio.WriteTrailer(archive)
}

// compressed is one archive, through zstd. One thread: how many there are shows in the output.
func compressed(ctx context.Context, records []cpio.Record) ([]byte, error) {
	var archive, complaints bytes.Buffer
	if err := writeSegment(&archive, records); err != nil {
		return nil, err
	}
	compressor := exec.CommandContext(ctx, "zstd", level, "--single-thread", "--quiet", "--stdout")
	compressor.Stdin, compressor.Stderr = &archive, &complaints
	out, err := compressor.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", compressor, err, bytes.TrimSpace(complaints.Bytes()))
	}
	return out, nil
}
