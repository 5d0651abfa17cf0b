// Package volume makes, opens and closes the volumes of disks. A volume is a chain of layers. A power cut can
// interrupt every change of a disk, and the next boot finishes it (see disk/journal.go). The packages disks and
// volumes decide which volumes there are, and on which disk.
package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/system/disk"
	"golang.org/x/sys/unix"
)

const (
	// unmountPatience is how long a file system may stay busy after everything
	// that used it was asked to stop.
	unmountPatience = 5 * time.Second
	unmountPoll     = 100 * time.Millisecond
)

// Dirs are boot.StateDir, boot.EphemeralDir and /etc. Tests have their own.
type Dirs struct{ State, Var, Etc string }

// Keeper has the open layers of all volumes. Who calls it sees to it that it changes a disk, and opens a volume, only
// once at a time.
type Keeper struct {
	Disks     *disk.Inventory
	Dirs      Dirs
	Processes *process.Table
	Log       *slog.Logger
	Before    func(step string) error // called before a step; tests cut the power there

	mu   sync.Mutex // guards open
	open []opened   // in the order of opening
}

// opened is an open layer, or a mount on one.
type opened struct {
	as    string // a device, or a directory
	close func() error
}

// Mounted reports whether a directory is mounted, of a volume or by Hold.
func (k *Keeper) Mounted(dir string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.isOpen(dir)
}

// isOpen: the caller holds k.mu.
func (k *Keeper) isOpen(as string) bool {
	return slices.ContainsFunc(k.open, func(o opened) bool { return o.as == as })
}

// Hold unmounts a directory before the volumes that were opened earlier.
func (k *Keeper) Hold(dir string) { k.hold(dir, func() error { return unmount(dir) }) }

func (k *Keeper) hold(as string, closes func() error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.isOpen(as) {
		k.open = append(k.open, opened{as, closes})
	}
}

// climb goes up the layers of a volume: each is called with a layer before that is opened, and with what it is on. No
// more is opened after it has returned false.
func (k *Keeper) climb(ctx context.Context, d disk.Disk, v Volume, each func(l Layer, on string) (open bool, err error)) error {
	on := d.Path
	for _, l := range v.Layers {
		open, err := each(l, on)
		if err != nil || !open {
			return err
		}
		if on, err = l.Open(ctx, on); err != nil {
			return fmt.Errorf("open %s of %s: %w", v.Label, d.Path, err)
		}
		k.hold(on, l.Close)
	}
	return nil
}

// top is the last layer, the file system.
func (v Volume) top() Layer { return v.Layers[len(v.Layers)-1] }

// Open mounts a volume if it isn't mounted yet.
func (k *Keeper) Open(ctx context.Context, d disk.Disk, v Volume) error {
	if k.Mounted(v.Dir) {
		return nil
	}
	return k.climb(ctx, d, v, func(Layer, string) (bool, error) { return true, nil })
}

// Close closes all that is open.
func (k *Keeper) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, o := range slices.Backward(k.open) {
		if err := o.close(); err != nil {
			k.Log.Warn(err.Error())
		}
	}
	k.open = nil
}

// Use mounts a device until use returns.
func Use(device, dir, kind string, flags uintptr, data string, use func(dir string) error) error {
	if err := unix.Mount(device, dir, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s (%s) on %s: %w", device, kind, dir, err)
	}
	err := use(dir)
	return errors.Join(err, unmount(dir))
}

// unmount waits a short time for the last user. Then it detaches the file
// system: open files stay usable, and the data is at least on the disk.
func unmount(dir string) error {
	var err error
	for end := time.Now().Add(unmountPatience); ; time.Sleep(unmountPoll) {
		if err = unix.Unmount(dir, 0); err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			break
		}
	}
	if err == nil {
		return nil
	}
	file, openErr := os.Open(dir)
	if openErr == nil {
		openErr = errors.Join(unix.Syncfs(int(file.Fd())), file.Close())
	}
	return errors.Join(fmt.Errorf("unmount %s: %w; detaching it", dir, err), openErr, unix.Unmount(dir, unix.MNT_DETACH))
}

// Volume is a chain of layers on a disk. They are opened in their order, and closed in the reverse one:
//
//	disk ── partition ─▶ device ── file system ─▶ directory where it is mounted
//
// What encrypts a volume is a layer between these two, which makes a device of a device.
type Volume struct {
	boot.Volume
	Layers []Layer
}

// Status is a volume as users see it.
type Status struct {
	Disk    string `yaml:"disk,omitempty" column:"DISK"` // such as /dev/sdb
	Size    string `yaml:"size,omitempty" column:"SIZE"`
	Layers  string `yaml:"layers,omitempty" column:"LAYERS"` // such as LUKS2 (0 nodeID), xfs; with its slots
	Mounted bool   `yaml:"mounted" column:"MOUNTED"`
	// Opened has the slots that have opened it, and when each last did: such as 0 2026-11-28T09:30:00Z.
	Opened string `yaml:"opened,omitempty" column:"OPENED"`
	// NoRecovery: it is encrypted, and has no recovery key.
	NoRecovery bool `yaml:"noRecovery,omitempty"`
	// Unlike: it is encrypted, or isn't, unlike what its configuration says.
	Unlike  bool   `yaml:"unlike,omitempty"`
	Problem string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// Encrypted reports whether the lowest layer is LUKS2.
func (s Status) Encrypted() bool { return strings.HasPrefix(s.Layers, "LUKS2") }

// Status is that of a volume on a disk that was inspected, which may have a problem. sealed shows its encryption, and
// what has opened it; "": it has none.
func (v Volume) Status(d disk.Disk, sealed func(device string) (encryption, opened string, err error), problem error) Status {
	s := Status{Disk: d.Path, Layers: v.FileSystem}
	p, err := d.Device(v.Label)
	if err = cmp.Or(d.Err, err); err == nil {
		var encryption string
		if encryption, s.Opened, err = sealed(p.Path); encryption != "" {
			s.Layers = encryption + ", " + s.Layers
		}
		s.Size = disk.SizeText(p.Size)
	}
	if problem = cmp.Or(problem, err); problem != nil {
		s.Problem = problem.Error()
	}
	return s
}

// Layer is what a volume consists of. The first one is on the disk, and each other one on what the one below it has
// opened.
type Layer interface {
	// Describe names the layer for users, with its article.
	Describe() string
	// On reports whether the layer is there.
	On(below string) (bool, error)
	// Create makes the layer, and ends after it is on the disk. The content of what is below is lost. The journal
	// covers it: an incomplete layer is created again.
	Create(ctx context.Context, below string) error
	// Open returns what the next layer is on. The layer may be open already, unless its volume is mounted.
	Open(ctx context.Context, below string) (above string, err error)
	// Close is called when nothing uses any more what Open has returned.
	Close() error
}

// Volume is one of these properties, with layers between its partition and its file system.
func (k *Keeper) Volume(v boot.Volume, between ...Layer) Volume {
	return Volume{v, slices.Concat([]Layer{partition(v.Label)}, between, []Layer{&fileSystem{k, v}})}
}

// partition is the layer with that label. It is made with the table of its disk.
type partition string

func (p partition) Describe() string                       { return "a partition " + string(p) }
func (partition) On(string) (bool, error)                  { return true, nil }
func (partition) Create(_ context.Context, _ string) error { return nil }
func (partition) Close() error                             { return nil }

func (p partition) Open(ctx context.Context, path string) (string, error) {
	return Partition(ctx, path, string(p))
}

// Partition is the device of a disk's partition, which the kernel may not have yet.
func Partition(ctx context.Context, path, label string) (string, error) {
	d, err := disk.At(path)
	if err == nil {
		err = d.Show(ctx)
	}
	if err != nil {
		return "", err
	}
	shown, err := d.Device(label)
	return shown.Path, err
}
