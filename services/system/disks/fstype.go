package disks

import (
	"context"
	"encoding/binary"
	"os"
	"os/exec"
	"strconv"
	"unsafe"

	"github.com/garboard-os/garboard/services/core/process"
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
		// s_blocks_count_lo, s_log_block_size and s_blocks_count_hi (the kernel's Documentation/filesystems/ext4/super.rst).
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
			if err := ioctl(file, resize, unsafe.Pointer(&blocks)); err != nil {
				return &os.PathError{Op: "grow to " + strconv.FormatInt(blocks, 10) + " blocks", Path: dir, Err: err}
			}
			return nil
		},
	},
}

// create is the command that makes a file system with a label.
func (f fsType) create(label, device string) *exec.Cmd {
	args := append(f.mkfs[1:len(f.mkfs):len(f.mkfs)], "-L", label[:min(len(label), f.labelLen)], device)
	return exec.Command(f.mkfs[0], args...)
}
