//go:build e2e

package e2etest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image/cache"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/vm"
)

// Kept is a machine that was made once, and turned off. Tests start copies of it, so that they needn't install one. Its
// files are in the cache of builds, which removes those that were used longest ago:
//
//	options, medium ─▶ hash ─▶ there is none: start, wait until it is as the tests need it, turn off ─▶ directory of the cluster, in the cache
//	                                                                                                    │ sparse copy
//	                                                                              each test: start ◀────┘
type Kept struct {
	// Dir is that of the cluster, in the cache: nobody may write to it.
	Dir               string
	name, provisioner string
	options           []Option
}

const (
	// keptPrefix is before the names of kept machines in the cache.
	keptPrefix = "machine-"
	// consoleFile has the console of a machine, in its directory: a copy begins a new one.
	consoleFile = "console.log"
)

// Keep makes a cluster of one machine, or finds it. until says what prepare waits for; with another text, the machine
// is made anew.
func Keep(t *testing.T, name, provisioner, until string, prepare func(c *Cluster, m *Mark), options ...Option) *Kept {
	t.Helper()
	o := newOptions(Built(t, provisioner), name, provisioner, options)
	inputs, err := madeOf(t.Context(), o, until)
	if err != nil {
		t.Fatal(err)
	}
	store, err := cache.Default()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := store.Build(t.Context(), keptPrefix+name, inputs, func(ctx context.Context, dir string) error {
		c, m := Start(t, name, provisioner, options...)
		prepare(c, m)
		if err := qemu.Stop(ctx, name); err != nil {
			return err
		}
		m.Reached("the machine is off, and kept for other tests")
		defer c.Down() // the copies have the same name
		return copyMachine(ctx, c.Dir(), dir, func(string) bool { return true })
	})
	if err != nil {
		t.Fatal(err)
	}
	return &Kept{Dir: dir, name: name, provisioner: provisioner, options: options}
}

// madeOf is what a machine is made of: the bytes that it boots, its images, its hardware and its configuration, without
// what is random in it.
func madeOf(ctx context.Context, o qemu.Options, until string) (inputs []string, err error) {
	choice, err := qemu.Choose(ctx, o.Provisioner)
	if err != nil {
		return nil, err
	}
	root, err := repository()
	if err != nil {
		return nil, err
	}
	// The system has the rest of what makes configurations.
	for _, path := range []string{o.Boot.Medium, o.Boot.Disk, filepath.Join(root, "qemu", "nodeconfig.go")} {
		sum, err := fileHash(path)
		if err != nil {
			return nil, err
		}
		inputs = append(inputs, sum)
	}
	return append(inputs, until, choice.Accelerator, o.Images, // its path has the hash of the content
		fmt.Sprint(o.ControlPlanes, o.Workers, o.CPUs, o.MemoryMiB, o.DiskGiB, o.Boot.UEFI, o.Boot.Cmdline, o.Unconfigured, o.Hardware, len(o.Mirrors)),
		fmt.Sprintf("%q %q", o.Patches, o.ControlPlanePatches)), nil
}

// fileHash is "" without a file.
func fileHash(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sum.Sum(nil)), nil
}

// Start starts a copy of the machine, from its disk. The options may give it a medium again. Its configuration is that
// on its disk.
func (k *Kept) Start(t *testing.T, options ...Option) (*Cluster, *Mark) {
	t.Helper()
	made := Built(t, k.provisioner)
	Pace(t)
	m := Marks(t)
	if os.Getenv(homeVar) == "" {
		Home(t)
	}
	o := newOptions(made, k.name, k.provisioner, k.options)
	o.Boot.Medium, o.Boot.Disk = "", ""
	for _, change := range options {
		change(&o)
	}
	home, err := qemu.Home()
	dir := filepath.Join(home, k.name)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = copyMachine(t.Context(), k.Dir, dir, func(name string) bool { return name != consoleFile && !strings.Contains(name, recordedWrites) })
	}
	if err == nil {
		err = changePlan(filepath.Join(dir, "plan.json"), o)
	}
	if err != nil {
		t.Fatalf("copy %s: %v", k.Dir, err)
	}
	c := up(t, o, made)
	m.Reached("power is on")
	return c, m
}

// changePlan is what a copy has that its original hadn't.
func changePlan(path string, o qemu.Options) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var p qemu.Plan
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	if p.Mirrors, err = network.NewMirrors(o.Mirrors); err != nil {
		return err
	}
	p.Unconfigured = true
	for i := range p.Nodes {
		if p.Nodes[i].Hardware.Medium = vm.OwnDisk; o.Boot.Medium != "" {
			p.Nodes[i].Hardware.Medium = vm.CD
		}
	}
	if data, err = json.Marshal(p); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

// copyMachine copies what is a cluster's own, of files those that are wanted: not what it boots, and not the locks and
// programs of its host process. Holes in disks stay holes.
func copyMachine(ctx context.Context, from, to string, wanted func(name string) bool) error {
	entries, err := os.ReadDir(from)
	for _, e := range entries {
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		switch {
		case err != nil:
			return err
		case e.IsDir() && !strings.HasPrefix(e.Name(), "boot-"):
			if err = os.Mkdir(target, 0o700); err == nil {
				err = copyMachine(ctx, source, target, wanted)
			}
		case e.Type().IsRegular() && e.Name() != "host" && e.Name() != "lock" && wanted(e.Name()):
			err = CopySparse(ctx, source, target)
		}
	}
	return err
}

// CopySparse copies a file with its holes.
func CopySparse(ctx context.Context, from, to string) error {
	out, err := exec.CommandContext(ctx, "cp", "--reflink=auto", "--sparse=always", "--preserve=mode", from, to).CombinedOutput()
	if err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	return nil
}
