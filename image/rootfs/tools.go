package rootfs

import "github.com/garboard-os/garboard/image/debian"

// Tools come from Debian's packages, laid out as on a node.
var Tools = debian.Set{
	Name:        "tools",
	Tree:        ".",
	Authorities: "etc/ssl/certs/ca-certificates", // where machine.files appends those of users
	Tools: []debian.Tool{
		{Package: "xfsprogs", Name: "mkfs.xfs", Why: "making STATE and EPHEMERAL"},
		{Package: "xfsprogs", Name: "xfs_growfs", Why: "growing EPHEMERAL with its disk"},
		{Package: "xfsprogs", Name: "xfs_repair", Why: "a filesystem whose log can't be replayed"},
		{Package: "dosfstools", Name: "mkfs.fat", Why: "making the EFI system partition"},
		{Package: "e2fsprogs", Name: "mke2fs", Why: "making data disks with ext4"},
		{Package: "e2fsprogs", Name: "e2fsck", Why: "an ext4 file system that is damaged"},
		{Package: "cryptsetup-bin", Name: "cryptsetup", Why: "LUKS2 headers"},
		{Package: "nftables", Name: "nft", Why: "the portmap plugin (hostPort) calls it"},
		{Package: "libgcc-s1", Name: "libgcc_s.so.1", Why: "glibc loads it when a thread ends: cryptsetup aborts without"},
	},
}
