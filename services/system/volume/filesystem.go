package volume

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"
	"unsafe"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// mkfsTimeout: mkfs writes some MiB per TiB, which takes seconds even on a
	// slow USB disk under emulation.
	mkfsTimeout = 5 * time.Minute
	// repairTimeout is enough for about ten million files on a slow disk.
	repairTimeout = 10 * time.Minute
	// growTimeout: it writes some KiB for each part (allocation group) of the file system.
	growTimeout = time.Minute
	// growFrom is how much is left over by making a file system, and isn't worth growing it.
	growFrom = 16 << 20
)

// fsType is how file systems of one kind are made, repaired and grown.
type fsType struct {
	mkfs     []string
	labelLen int

	repair     string // -n looks for damage only
	repairArgs []string
	corrupt    int // its exit code with -n, if there is damage
	repaired   int // its exit code after a repair; 0: as for no damage
	dirtyLog   int // its exit code if the log can't be replayed; 0: it has none of these

	// size reads the superblock of a device, which begins with super.
	size func(super []byte) (block, blocks int64)
	// grow makes a mounted file system that many blocks large, which is all of its device.
	grow func(ctx context.Context, processes *process.Table, dir string, blocks int64) error
}

// fsTypes are those that the node makes, by their names in mount(2). The exit codes are in xfs_repair(8) and e2fsck(8).
var fsTypes = map[string]fsType{
	"xfs": {
		mkfs: []string{"/usr/sbin/mkfs.xfs", "-q", "-f"}, labelLen: 12,
		repair: "/usr/sbin/xfs_repair", corrupt: 1, dirtyLog: 2,
		// sb_blocksize and sb_dblocks ("XFS Algorithms & Data Structures", Superblocks).
		size: func(super []byte) (int64, int64) {
			return int64(binary.BigEndian.Uint32(super[4:])), int64(binary.BigEndian.Uint64(super[8:]))
		},
		grow: func(ctx context.Context, processes *process.Table, dir string, _ int64) error {
			return processes.Run(ctx, exec.Command("/usr/sbin/xfs_growfs", "-d", dir))
		},
	},
	"ext4": {
		mkfs: []string{"/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4"}, labelLen: 16,
		repair: "/usr/sbin/e2fsck", repairArgs: []string{"-f", "-y"}, corrupt: 4, repaired: 1,
		// s_blocks_count_lo, s_log_block_size and s_blocks_count_hi (the kernel's
		// Documentation/filesystems/ext4/super.rst).
		size: func(super []byte) (int64, int64) {
			number := func(at int) int64 { return int64(binary.LittleEndian.Uint32(super[1024+at:])) }
			return 1024 << number(0x18), number(0x150)<<32 | number(0x4)
		},
		grow: func(_ context.Context, _ *process.Table, dir string, blocks int64) error {
			file, err := os.Open(dir)
			if err != nil {
				return err
			}
			defer file.Close()
			const resize = 0x40086610 // EXT4_IOC_RESIZE_FS (linux/ext4.h), as resize2fs does it
			if err := disk.Ioctl(file, resize, unsafe.Pointer(&blocks)); err != nil {
				return &os.PathError{Op: "grow to " + strconv.FormatInt(blocks, 10) + " blocks", Path: dir, Err: err}
			}
			return nil
		},
	},
}

// fileSystem is the uppermost layer: to open it is to mount it.
type fileSystem struct {
	keeper *Keeper
	boot.Volume
}

func (f *fileSystem) Describe() string { return "an " + f.FileSystem + " file system" }

func (f *fileSystem) On(device string) (bool, error) {
	c, err := disk.Identify(device)
	return c.Kind == f.FileSystem, err
}

func (f *fileSystem) Create(ctx context.Context, device string) error {
	ctx, cancel := context.WithTimeout(ctx, mkfsTimeout)
	defer cancel()
	kind := fsTypes[f.FileSystem]
	args := append(kind.mkfs[1:len(kind.mkfs):len(kind.mkfs)], "-L", f.Label[:min(len(f.Label), kind.labelLen)], device)
	if err := f.keeper.Processes.Run(ctx, exec.Command(kind.mkfs[0], args...)); err != nil {
		return err
	}
	file, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", device, err)
	}
	return nil
}

// Open mounts the file system, after a repair if it is damaged, and makes it as large as its device.
func (f *fileSystem) Open(ctx context.Context, device string) (dir string, err error) {
	if mounted, err := mountinfo.Mounted(f.Dir); err != nil {
		return "", err
	} else if mounted {
		return "", fmt.Errorf("mount %s on %s: something else is mounted there", device, f.Dir)
	}
	log := f.keeper.Log
	err = unix.Mount(device, f.Dir, f.FileSystem, f.Flags, "")
	if f.damaged(ctx, device, err) {
		log.Warn(fmt.Sprintf("%s on %s is damaged: repairing it, for at most %s", f.Label, device, repairTimeout))
		// After an error of the disk, its log may be whole: the next try may replay it.
		if err := f.repair(ctx, device, !errors.Is(err, unix.EIO)); err != nil {
			return "", fmt.Errorf("repair %s (%s): %w", f.Label, device, err)
		}
		log.Warn(fmt.Sprintf("%s on %s is repaired", f.Label, device))
		err = unix.Mount(device, f.Dir, f.FileSystem, f.Flags, "")
	}
	if err != nil {
		return "", fmt.Errorf("mount %s (%s) on %s: %w", f.Label, device, f.Dir, err)
	}
	if err := f.grow(ctx, device); err != nil {
		log.Warn(fmt.Sprintf("%s doesn't use all of %s: %v", f.Label, device, err))
	}
	return f.Dir, nil
}

func (f *fileSystem) Close() error { return unmount(f.Dir) }

// damaged distinguishes a file system that needs repair from all other reasons
// why it can't be mounted. The kernel itself replays the log after a power cut.
func (f *fileSystem) damaged(ctx context.Context, device string, err error) bool {
	switch {
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG): // wrong structure, wrong checksum
		return true
	case !errors.Is(err, unix.EIO):
		return false
	}
	// The kernel returns this for some damaged headers, and for a failing disk,
	// which must not be repaired. A check without changes shows which of them it is.
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	kind := fsTypes[f.FileSystem]
	return exitCode(f.keeper.Processes.Run(ctx, exec.Command(kind.repair, "-n", device))) == kind.corrupt
}

// repair repairs a file system. If the log of xfs can't be replayed, and may be discarded, its
// last seconds are lost, and the rest is saved.
func (f *fileSystem) repair(ctx context.Context, device string, discard bool) error {
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	kind := fsTypes[f.FileSystem]
	err := f.keeper.Processes.Run(ctx, exec.Command(kind.repair, append(kind.repairArgs, device)...))
	switch code := exitCode(err); {
	case code != 0 && code == kind.repaired:
		return nil
	case code != 0 && code == kind.dirtyLog && discard:
		f.keeper.Log.Warn(fmt.Sprintf("the log of %s can't be replayed: giving up what was written in the last seconds", device))
		return f.keeper.Processes.Run(ctx, exec.Command(kind.repair, "-L", device))
	}
	return err
}

// exitCode is that of a program that has failed; 0 for other errors.
func exitCode(err error) int {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	return 0
}

// grow makes the mounted file system as large as its device.
func (f *fileSystem) grow(ctx context.Context, device string) error {
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	defer file.Close()
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	super := make([]byte, 4096)
	if _, err := file.ReadAt(super, 0); err != nil {
		return err
	}
	kind := fsTypes[f.FileSystem]
	block, blocks := kind.size(super)
	if size-block*blocks < growFrom {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growTimeout)
	defer cancel()
	return kind.grow(ctx, f.keeper.Processes, f.Dir, size/block)
}
