package oci

import "github.com/garboard-os/garboard/image/debian"

const (
	// toolTree and caBundle are where the layers find the tools, and the bundle of certificate authorities, which all
	// images have.
	toolTree = "tree"
	caBundle = "ca-certificates.crt"
)

// containerTools are what the kubelet, kube-proxy and flannel call when they mount, format, check and filter.
var containerTools = debian.Set{
	Name:        "container-tools",
	Tree:        toolTree,
	Authorities: caBundle,
	Tools: []debian.Tool{
		{Package: "mount", Name: "mount", Why: "volumes"},
		{Package: "mount", Name: "umount", Why: "volumes"},
		{Package: "mount", Name: "losetup", Why: "block volumes"},
		{Package: "util-linux", Name: "findmnt", Why: "shows mounts"},
		{Package: "util-linux", Name: "nsenter", Why: "storage drivers enter the host's mount namespace"},
		{Package: "util-linux", Name: "lsblk", Why: "storage drivers look for disks"},
		{Package: "util-linux", Name: "blkid", Why: "which file system a disk has, before it is formatted"},
		{Package: "util-linux", Name: "blockdev", Why: "sizes, before a file system is grown"},
		{Package: "util-linux", Name: "fsck", Why: "checks before mounting, and calls fsck.TYPE"},
		{Package: "e2fsprogs", Name: "mke2fs", Links: []string{"mkfs.ext2", "mkfs.ext3", "mkfs.ext4"}, Why: "formats ext4 volumes"},
		{Package: "e2fsprogs", Name: "e2fsck", Links: []string{"fsck.ext2", "fsck.ext3", "fsck.ext4"}, Why: "checks them"},
		{Package: "e2fsprogs", Name: "resize2fs", Why: "grows them"},
		{Package: "e2fsprogs", Name: "dumpe2fs", Why: "whether one needs to grow"},
		{Package: "e2fsprogs", Name: "tune2fs", Why: "quotas on ext4"},
		{Package: "e2fsprogs", Name: "etc/mke2fs.conf", Why: "Debian's defaults for ext4"},
		{Package: "xfsprogs", Name: "mkfs.xfs", Why: "formats xfs volumes"},
		{Package: "xfsprogs", Name: "xfs_repair", Why: "checks them"},
		{Package: "xfsprogs", Name: "xfs_growfs", Why: "grows them"},
		{Package: "xfsprogs", Name: "xfs_io", Why: "whether one needs to grow"},
		{Package: "xfsprogs", Name: "xfs_quota", Why: "project quotas of ephemeral storage"},
		{Package: "coreutils", Name: "true", Links: []string{"fsck.xfs"}, Why: "xfs is checked by mounting it; Debian's own fsck.xfs is a shell script that says so"},
		{Package: "coreutils", Name: "cp", Why: "flannel's published manifest copies its CNI configuration with it"},
		{Package: "nfs-common", Name: "mount.nfs", Links: []string{"mount.nfs4", "umount.nfs", "umount.nfs4"}, Why: "NFS volumes"},
		{Package: "libtirpc-common", Name: "etc/netconfig", Why: "mount.nfs finds out from it what UDP and TCP are"},
		{Package: "netbase", Name: "etc/protocols", Why: "names of protocols, for iptables and mount.nfs"},
		{Package: "netbase", Name: "etc/services", Why: "names of ports, for iptables and nft"},
		{Package: "nftables", Name: "nft", Why: "kube-proxy and flannel in nftables mode"},
		{Package: "iptables", Name: "xtables-nft-multi", Links: []string{
			"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore",
			"iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore",
		}, Why: "kubelet's hint chain, kube-proxy in iptables mode, rules left by either"},
		{Package: "iptables", Name: "usr/lib/x86_64-linux-gnu/xtables", Why: "iptables loads its matches and targets from here"},
		{Package: "conntrack", Name: "conntrack", Why: "kube-proxy drops stale UDP flows"},
		{Package: "libgcc-s1", Name: "libgcc_s.so.1", Why: "glibc loads it when a thread ends"},
	},
}
