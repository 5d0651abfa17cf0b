package kernel

// Row is a family of modules that are wanted for one reason.
type Row struct {
	// Names are the modules, separated by blanks, as /proc/modules writes them.
	Names string
	// Why says what a node can't do without them.
	Why string
	// Only is the one flavour that they are for; empty for all.
	Only Flavour
	// Optional modules are taken if they exist. Kernels of other versions or distributions build them in, merge them into another module,
	// or drop them.
	Optional bool
}

// Modules is the curated list. What isn't here isn't on a node; what is here is loaded only when its device appears, or when a
// service or the kernel itself asks for it by name. Modules that only others need don't have to be listed.
//
// Left out on purpose: sound, graphics, wireless, Bluetooth, cameras, amateur radio, InfiniBand and RDMA, filesystems that nobody boots
// or mounts on a node (SMB among them), compressed swap, RAID with parity, and drivers that do nothing without firmware that Debian
// can't ship in its main archive (bnx2, bnx2x, qede, qla2xxx). The whole has to fit a budget: see the test.
var Modules = []Row{
	// Stage 1: the way from the initramfs to the root filesystem.
	{Names: "loop", Why: "the root filesystem is a file in the initramfs; also local volumes"},
	{Names: "squashfs", Why: "the root filesystem"},
	{Names: "overlay", Why: "/etc of the node, and the layers of containers"},

	// Filesystems.
	{Names: "xfs", Why: "EPHEMERAL and STATE"},
	{Names: "ext4", Why: "volumes of CSI drivers; data disks that exist already"},
	{Names: "vfat nls_cp437 nls_iso8859_1 nls_ascii nls_utf8", Why: "the EFI system partition; firmware and users write names in any of these"},
	{Names: "isofs", Why: "booting from ISO, and configuration on a volume labelled metal-iso"},
	{Names: "fuse virtiofs", Why: "FUSE in pods; shares of the hypervisor"},
	{Names: "nfsv4 nfsv3 rpcsec_gss_krb5 nfs_layout_nfsv41_files nfs_layout_flexfiles", Why: "NFS volumes, v4 with its parallel layouts, and v3 for old servers"},
	{Names: "ceph rbd", Why: "Ceph's CSI drivers"},
	{Names: "efivarfs efi_pstore", Why: "boot entries and boot counting; the last words of a kernel that died"},
	{Names: "ramoops", Why: "the last words of a kernel that died, where the firmware keeps memory across a reset", Optional: true},
	{Names: "configfs", Why: "iSCSI targets and netconsole are set up through it"},

	// Block devices.
	{Names: "virtio_blk virtio_scsi", Why: "disks of QEMU and most clouds"},
	{Names: "nvme", Why: "NVMe disks, and those of the big clouds"},
	{Names: "nvme_tcp", Why: "NVMe over TCP: networked volumes"},
	{Names: "vmd", Why: "NVMe behind Intel's volume management", Only: Generic},
	{Names: "sd_mod sr_mod sg", Why: "SCSI, SATA and USB disks; CD drives; SMART and multipath tools in pods"},
	{Names: "ahci ata_piix ata_generic", Why: "SATA and the IDE of old machines and hypervisors", Only: Generic},
	{Names: "sata_nv sata_sil sata_sil24 sata_mv sata_via", Why: "SATA controllers from before AHCI", Only: Generic},
	{Names: "megaraid_sas mpt3sas mpi3mr smartpqi hpsa aacraid", Why: "RAID and SAS controllers of servers", Only: Generic},
	{Names: "mptspi mptsas", Why: "SCSI controllers that VMware and others emulate", Only: Generic},
	{Names: "vmw_pvscsi hv_storvsc xen_blkfront", Why: "disks of VMware, Hyper-V and Xen"},
	{Names: "mmc_block sdhci_pci sdhci_acpi", Why: "eMMC and SD cards of small machines", Only: Generic},
	{Names: "usb_storage uas", Why: "booting from a USB stick, and USB disks", Only: Generic},
	{Names: "iscsi_tcp nbd", Why: "networked volumes: iSCSI (Longhorn, most storage boxes), network block devices"},
	{Names: "dm_mod", Why: "device mapper: everything below"},
	{Names: "dm_crypt", Why: "disk encryption (LUKS2)"},
	{Names: "dm_verity", Why: "checked read-only images"},
	{Names: "dm_integrity", Why: "authenticated encryption (LUKS2 with integrity)"},
	{Names: "dm_snapshot dm_thin_pool dm_mirror", Why: "LVM, for CSI drivers on local disks"},
	{Names: "dm_multipath dm_round_robin dm_service_time", Why: "disks that are reached in several ways"},
	{Names: "raid0 raid1 raid10", Why: "software RAID on data disks"},

	// Crypto: what dm-crypt, WireGuard and filesystems ask for by algorithm, which no dependency names.
	{Names: "xts cbc ecb essiv aes_ti", Why: "the modes of AES in LUKS2 headers", Optional: true},
	{Names: "aesni_intel ghash_clmulni_intel", Why: "AES at the speed of the processor"},
	{Names: "sha256_ssse3 sha512_ssse3 sha512_generic sha1_ssse3", Why: "hashes of LUKS2 and dm-verity", Optional: true},
	{Names: "adiantum", Why: "encryption on processors without AES"},
	{Names: "af_alg algif_skcipher algif_hash algif_aead", Why: "cryptsetup opens key slots through the kernel's crypto"},
	{Names: "crc32c_intel crc32c_generic crc32_pclmul crct10dif_pclmul", Why: "checksums of xfs, ext4, iSCSI and NVMe over TCP", Optional: true},
	{Names: "cmac ccm gcm ctr authenc echainiv seqiv", Why: "IPsec (CNI encryption) and Kerberos", Optional: true},
	{Names: "chacha_x86_64 poly1305_x86_64 curve25519_x86_64", Why: "WireGuard at the speed of the processor", Optional: true},
	{Names: "rsa_generic pkcs8_key_parser", Why: "keys in the kernel's keyring", Optional: true},

	// Network devices.
	{Names: "virtio_net", Why: "network of QEMU and most clouds"},
	{Names: "ena gve hv_netvsc vmxnet3 xen_netfront", Why: "AWS, Google, Hyper-V and Azure, VMware, Xen"},
	{Names: "mana", Why: "Azure's newer network", Optional: true},
	{Names: "ixgbevf mlx4_en mlx5_core", Why: "virtual functions that clouds hand through; Mellanox on metal"},
	{Names: "iavf igbvf", Why: "virtual functions of Intel on metal", Only: Generic},
	{Names: "e1000 e1000e igb igc ixgbe i40e ice", Why: "Intel, from the one that every hypervisor emulates to 100 Gbit/s", Only: Generic},
	{Names: "tg3 bnxt_en", Why: "Broadcom", Only: Generic},
	{Names: "r8169 8139too 8139cp realtek", Why: "Realtek: most small machines, and its PHY", Only: Generic},
	{Names: "atlantic alx atl1c sky2 forcedeth pcnet32 ne2k_pci", Why: "Aquantia, Atheros, Marvell, Nvidia, and what old hypervisors emulate", Only: Generic},
	{Names: "be2net enic", Why: "Emulex and Cisco in servers", Only: Generic},
	{Names: "amd_xgbe", Why: "network built into AMD's embedded processors", Only: Generic},
	{Names: "marvell marvell10g broadcom aquantia bcm87xx", Why: "PHYs of the above", Optional: true},
	{Names: "r8152 ax88179_178a asix cdc_ether cdc_ncm smsc75xx smsc95xx", Why: "network over USB", Only: Generic},

	// Network: links and protocols.
	{Names: "bonding 8021q bridge br_netfilter veth tun dummy", Why: "links that a node's configuration and every CNI make"},
	{Names: "macvlan macvtap ipvlan ipvtap vrf ifb", Why: "links of other CNIs and of virtual machines in pods"},
	{Names: "vxlan geneve ipip sit ip_gre ip6_gre ip6_tunnel ip_tunnel", Why: "tunnels of CNIs (flannel, Calico, Cilium) and load balancers"},
	{Names: "wireguard", Why: "encrypted links: wg0, and CNIs"},
	{Names: "fou mpls_router mpls_iptunnel lwtunnel", Why: "encapsulations that load balancers use", Optional: true},
	{Names: "af_key xfrm_user xfrm_interface esp4 esp6 ah4 ah6 ipcomp", Why: "IPsec (CNI encryption)", Optional: true},
	{Names: "inet_diag tcp_diag udp_diag unix_diag netlink_diag af_packet_diag", Why: "listing sockets", Optional: true},
	{Names: "tcp_bbr sctp", Why: "congestion control over lossy links; SCTP is a protocol that Services may name"},
	{Names: "sch_fq sch_htb sch_tbf sch_ingress sch_prio sch_netem sch_sfq sch_cake", Why: "queues: bandwidth limits of pods, eBPF programs of CNIs"},
	{Names: "cls_bpf cls_u32 cls_fw cls_flower cls_matchall cls_basic act_bpf act_mirred act_gact act_police act_skbedit act_ct", Why: "what goes into which queue"},
	{Names: "vsock vmw_vsock_virtio_transport vhost_net vhost_vsock", Why: "talking to the hypervisor, and virtual machines in pods"},
	{Names: "kvm kvm_intel kvm_amd", Why: "virtual machines in pods (KubeVirt, Kata)", Only: Generic},
	{Names: "netconsole", Why: "a console where there is none", Optional: true},

	// Packet filter: kube-proxy in each mode, CNI portmap and firewall plugins, flannel, Calico, Cilium, the node's own firewall.
	{Names: "nfnetlink nf_conntrack nf_conntrack_netlink nf_nat nf_tables", Why: "connection tracking and nftables"},
	{Names: "nft_chain_nat nft_ct nft_nat nft_masq nft_redir nft_reject nft_reject_inet nft_reject_ipv4 nft_reject_ipv6", Why: "kube-proxy in nftables mode"},
	{Names: "nft_limit nft_log nft_numgen nft_hash nft_quota nft_queue nft_connlimit nft_socket nft_tproxy nft_synproxy", Why: "nftables rules of the node, kube-proxy and CNIs"},
	{Names: "nft_fib nft_fib_inet nft_fib_ipv4 nft_fib_ipv6 nft_fib_netdev nft_flow_offload nf_flow_table nf_flow_table_inet", Why: "local addresses in kube-proxy's sets; offloaded flows"},
	{Names: "nft_compat nft_meta_bridge nft_reject_bridge nft_dup_netdev nft_fwd_netdev nft_xfrm", Why: "iptables-nft in containers; bridges", Optional: true},
	{Names: "nft_counter nft_objref", Why: "counters and named objects, modules of their own in older kernels", Optional: true},
	{Names: "ip_tables iptable_filter iptable_nat iptable_mangle iptable_raw ip6_tables ip6table_filter ip6table_nat ip6table_mangle ip6table_raw", Why: "iptables-legacy in containers"},
	{Names: "ipt_REJECT ip6t_REJECT ipt_rpfilter ip6t_rpfilter xt_MASQUERADE xt_NETMAP xt_REDIRECT xt_nat xt_CT xt_TPROXY xt_TCPMSS xt_CHECKSUM xt_NFLOG xt_LOG xt_CLASSIFY xt_DSCP xt_TRACE", Why: "targets of iptables rules"},
	{Names: "xt_addrtype xt_bpf xt_cgroup xt_comment xt_connlimit xt_connmark xt_conntrack xt_hashlimit xt_iprange xt_length xt_limit xt_mac xt_mark xt_multiport xt_nfacct xt_owner xt_physdev xt_pkttype xt_policy xt_recent xt_sctp xt_set xt_socket xt_state xt_statistic xt_string xt_tcpmss xt_tcpudp xt_time xt_u32", Why: "matches of iptables rules (kube-proxy, portmap, network policies)"},
	{Names: "ip_set ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_hash_net ip_set_hash_netport ip_set_hash_netnet ip_set_hash_netiface ip_set_bitmap_port ip_set_bitmap_ip ip_set_list_set", Why: "sets of addresses: kube-proxy in ipvs mode, Calico"},
	{Names: "ip_vs ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_sh ip_vs_dh ip_vs_sed ip_vs_nq ip_vs_mh ip_vs_ftp", Why: "kube-proxy in ipvs mode"},
	{Names: "nf_conntrack_ftp nf_nat_ftp nf_conntrack_tftp nf_nat_tftp", Why: "connections with helpers (PXE servers in pods)"},
	{Names: "nfnetlink_log nfnetlink_queue nfnetlink_cttimeout nfnetlink_cthelper nfnetlink_acct nf_log_syslog", Why: "rules that log, queue or count"},

	// The machine itself.
	{Names: "virtio_pci virtio_console virtio_balloon virtio_rng", Why: "devices of QEMU: the bus, consoles, memory, entropy"},
	{Names: "virtio_mmio virtio_input", Why: "devices of small hypervisors without PCI", Optional: true},
	{Names: "qemu_fw_cfg", Why: "configuration that QEMU hands over"},
	{Names: "button", Why: "the ACPI power button: a hypervisor's shutdown"},
	{Names: "evdev", Why: "reading the power button"},
	{Names: "hid_generic hid_hyperv hyperv_keyboard", Why: "keyboards, also Hyper-V's"},
	{Names: "xhci_pci ehci_pci ohci_pci uhci_hcd usbhid", Why: "USB and its keyboards", Only: Generic},
	{Names: "cdc_acm ftdi_sio pl2303 cp210x ch341", Why: "serial lines over USB: consoles, and the radio sticks of small sites", Only: Generic},
	{Names: "hv_vmbus hv_utils hv_balloon pci_hyperv", Why: "Hyper-V: bus, shutdown and time, memory"},
	{Names: "vmw_balloon vmw_vmci vmw_vsock_vmci_transport", Why: "VMware: memory, tools"},
	{Names: "xen_wdt", Why: "Xen's watchdog", Optional: true},
	{Names: "softdog wdat_wdt", Why: "watchdogs: of the kernel itself, and of the ACPI tables"},
	{Names: "iTCO_wdt sp5100_tco i6300esb ib700wdt hpwdt w83627hf_wdt it87_wdt", Why: "watchdogs of Intel's and AMD's chipsets, of QEMU, of HPE, of boards", Only: Generic},
	{Names: "tpm_tis tpm_crb", Why: "TPM 2.0: sealing disk keys, measuring the boot"},
	{Names: "rtc_cmos", Why: "the clock that runs while the power is off"},
	{Names: "ipmi_msghandler ipmi_si ipmi_devintf ipmi_watchdog", Why: "the management controller of a server", Only: Generic},
	{Names: "acpi_cpufreq coretemp k10temp acpi_power_meter", Why: "frequency and temperature, for metrics", Only: Generic},
	{Names: "intel_rapl_msr msr cpuid", Why: "power and processor registers, for metrics and microcode tools", Optional: true},
	{Names: "i2c_i801 lpc_ich", Why: "buses that watchdogs and sensors hang on", Only: Generic},
	{Names: "ptp_kvm", Why: "the host's clock, in a virtual machine", Optional: true},
}
