package debian

import (
	"bytes"
	"debug/elf"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

const (
	// authoritiesFolder of authoritiesPackage is where the certificates lie, one per file.
	authoritiesPackage = "ca-certificates"
	authoritiesFolder  = "usr/share/ca-certificates/mozilla"
	// libraryFolder is where Debian's dynamic linker looks without a cache file.
	libraryFolder = "usr/lib/x86_64-linux-gnu"
	// linkerFolder is where programs say that the dynamic linker is.
	linkerFolder = "usr/lib64"
)

// Where packages have their files.
var (
	programFolders = []string{"usr/bin", "usr/sbin"}
	libraryFolders = []string{libraryFolder, linkerFolder}
)

// picker copies files from unpacked packages into the layout with one /usr, and whatever libraries their ELF headers
// ask for.
type picker struct {
	from, to string
	taken    map[string]bool // the libraries that were asked for already
}

func newPicker(from, to string) *picker {
	return &picker{from: from, to: to, taken: map[string]bool{}}
}

func (p *picker) take(t Tool) error {
	switch {
	case strings.Contains(t.Name, "/"):
		return p.path(t.Name)
	case strings.Contains(t.Name, ".so"):
		return p.library(t.Name)
	}
	source, folder, err := p.find(t.Name, programFolders)
	if err != nil {
		return err
	}
	target := path.Join("usr", path.Base(folder))
	if err := p.object(source, path.Join(target, t.Name), 0o755); err != nil {
		return err
	}
	for _, name := range t.Links {
		if err := p.link(t.Name, path.Join(target, name)); err != nil {
			return err
		}
	}
	return nil
}

// find looks for a file by its base name. Links are followed: libx.so.1 is one to libx.so.1.2.3, and the copy is a file
// with the former name, the only one that is asked for.
func (p *picker) find(name string, folders []string) (source, folder string, err error) {
	for _, folder := range folders {
		source := filepath.Join(p.from, folder, name)
		// An absolute link leads out of the packages, to the build machine's own files, which aren't what apt verified.
		if target, err := os.Readlink(source); err == nil && path.IsAbs(target) {
			source = filepath.Join(p.from, target)
		}
		if info, err := os.Stat(source); err == nil && info.Mode().IsRegular() {
			return source, folder, nil
		}
	}
	return "", "", fmt.Errorf("no package holds %s: %w", name, fs.ErrNotExist)
}

// path takes a file, or a folder: of plug-ins, with the libraries that they need, or of any other files.
func (p *picker) path(name string) error {
	info, err := os.Stat(filepath.Join(p.from, name))
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return p.copy(filepath.Join(p.from, name), name, 0o644)
	}
	files, err := os.ReadDir(filepath.Join(p.from, name))
	if err != nil {
		return err
	}
	for _, f := range files {
		at := path.Join(name, f.Name())
		source := filepath.Join(p.from, at)
		if f.Type()&fs.ModeSymlink == 0 {
			take := p.object
			if !isELF(source) {
				take = p.copy
			}
			if err := take(source, at, 0o644); err != nil {
				return err
			}
			continue
		}
		target, err := os.Readlink(source)
		if err != nil {
			return err
		}
		if err := p.link(target, at); err != nil {
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
	source, _, err := p.find(name, libraryFolders)
	if err != nil {
		return err
	}
	target := path.Join(libraryFolder, name)
	if !strings.HasPrefix(name, "ld-linux") {
		return p.object(source, target, 0o644)
	}
	// The dynamic linker is a program, too.
	if err := p.object(source, target, 0o755); err != nil {
		return err
	}
	return p.link(path.Join("..", strings.TrimPrefix(target, "usr/")), path.Join(linkerFolder, name))
}

// object copies a program or library, and takes what it needs.
func (p *picker) object(source, target string, perm fs.FileMode) error {
	needs, err := needed(source)
	if err != nil {
		return fmt.Errorf("read %s: %w", path.Base(source), err)
	}
	if err := p.copy(source, target, perm); err != nil {
		return err
	}
	for _, name := range needs {
		if err := p.library(name); err != nil {
			return fmt.Errorf("%s: %w", path.Base(source), err)
		}
	}
	return nil
}

func (p *picker) copy(source, target string, perm fs.FileMode) error {
	content, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	return write(filepath.Join(p.to, target), content, perm)
}

func (p *picker) link(target, at string) error {
	name := filepath.Join(p.to, at)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.Symlink(target, name)
}

// write leaves the permission bits to the umask, except for whether the owner may execute: images go by nothing else.
func write(name string, content []byte, perm fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, content, perm)
}

func isELF(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false // the copy reports it
	}
	defer f.Close()
	magic := make([]byte, len(elf.ELFMAG))
	_, err = io.ReadFull(f, magic)
	return err == nil && string(magic) == elf.ELFMAG
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

// bundle joins certificate authorities into the one file that programs read, which is what the package's maintainer
// script would do.
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
		if block, _ := pem.Decode(content); block == nil || block.Type != "CERTIFICATE" {
			return fmt.Errorf("%s holds no certificate", filepath.Base(name))
		}
		all = append(append(all, bytes.TrimSpace(content)...), '\n')
	}
	return write(file, all, 0o644)
}
