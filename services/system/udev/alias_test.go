package udev

import (
	"fmt"
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// Lines as depmod writes them for Debian's kernels.
const sampleAliases = `# Aliases extracted from modules themselves.
alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci
alias pci:v00008086d00001533sv*sd*bc*sc*i* igb
alias pci:v*d*sv*sd*bc01sc08i02* nvme
alias pci:v00008086d*sv*sd*bc01sc06i01* ahci
alias pci:v*d*sv*sd*bc01sc06i01* ahci
alias virtio:d00000001v* virtio_net
alias virtio:d00000002v* virtio_blk
alias acpi*:QEMU0002:* qemu_fw_cfg
alias acpi*:PNP0C0C:* button
alias acpi*:LNXPWRBN:* button
alias input:b*v*p*e*-e*1,*k*r*a*m*l*s*f*w* evdev
alias usb:v0BDAp8153d*dc*dsc*dp*ic*isc*ip*in* r8152
alias usb:v*p*d*dc*dsc*dp*ic08isc06ip50in* usb_storage
alias usb:v152Dp0539d01[0-9]*dc*dsc*dp*ic08isc*ip*in* uas
alias cpu:type:x86,ven*fam*mod*:feature:*0099* aesni_intel
alias cpu:type:x86,ven0000fam0006mod*:feature:*0085* kvm_intel
alias dmi*:svnDellInc.:* dcdbas
alias fs-xfs xfs
alias rtnl-link-vxlan vxlan
alias nft-expr-2-masq nft_masq
alias net-pf-10 ipv6
alias devname:net/tun tun
alias char-major-10-200 tun
alias crypto-aes aesni_intel
alias of:N*T*Cvirtio,mmio virtio_mmio
alias of:N*T*Cvirtio,mmioC* virtio_mmio
alias tcp_congestion_bbr-x tcp-bbr
`

func TestMatch(t *testing.T) {
	a := parseAliases(sampleAliases)
	for modalias, want := range map[string][]string{
		"pci:v00001AF4d00001000sv00001AF4sd00000001bc02sc00i00":       {"virtio_pci"},
		"pci:v00008086d00001533sv00001028sd000004F7bc02sc00i00":       {"igb"},
		"pci:v0000144Dd0000A808sv0000144Dsd0000A801bc01sc08i02":       {"nvme"},
		"pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01":       {"ahci"}, // by two patterns, once
		"pci:v00008086d00001534sv00001028sd000004F7bc02sc00i00":       nil,
		"virtio:d00000001v00001AF4":                                   {"virtio_net"},
		"virtio:d00000003v00001AF4":                                   nil,
		"acpi:QEMU0002:":                                              {"qemu_fw_cfg"},
		"acpi:LNXPWRBN:":                                              {"button"},
		"acpi:PNP0A08:PNP0C0C:":                                       {"button"}, // several ids in one
		"input:b0019v0000p0001e0000-e0,1,k74,ramlsfw":                 {"evdev"},
		"input:b0019v0000p0001e0000-e0,2,k74,ramlsfw":                 nil,
		"usb:v152Dp0539d0105dc00dsc00dp00ic08isc06ip50in00":           {"usb_storage", "uas"},
		"usb:v152Dp0539d0205dc00dsc00dp00ic08isc06ip50in00":           {"usb_storage"},
		"cpu:type:x86,ven0000fam0006mod009E:feature:,0000,0085,0099,": {"aesni_intel", "kvm_intel"},
		"cpu:type:x86,ven0002fam0017mod0031:feature:,0000,0085,":      nil,
		"dmi:bvnDellInc.:bvr2.1:svnDellInc.:pnX:":                     {"dcdbas"},
		"dmi:bvnDellInc.:bvrA/2-1:svnDellInc.:pnX/Y:":                 {"dcdbas"},
		"fs-xfs":                        {"xfs"},
		"fs_xfs":                        {"xfs"}, // dashes and underscores are one
		"fs-xfs2":                       nil,
		"rtnl-link-vxlan":               {"vxlan"},
		"char-major-10-200":             {"tun"},
		"of:NvirtioT(null)Cvirtio,mmio": {"virtio_mmio"},
		"tcp_congestion_bbr_x":          {"tcp_bbr"},
		"":                              nil,
	} {
		if d := cmp.Diff(want, a.match(modalias)); d != "" {
			t.Errorf("%s (-want +got):\n%s", modalias, d)
		}
	}
}

// The index must find the same modules as a comparison with every pattern.
func TestIndexFindsWhatAScanFinds(t *testing.T) {
	alphabet := rapid.StringOfN(rapid.RuneFrom([]rune("pciv0*?-_[:")), 1, 10, -1)
	rapid.Check(t, func(t *rapid.T) {
		patterns := rapid.SliceOfN(alphabet, 0, 20).Draw(t, "patterns")
		s := rapid.StringOfN(rapid.RuneFrom([]rune("pciv0-_:")), 0, 12, -1).Draw(t, "s")
		var text strings.Builder
		var want []string
		for i, p := range patterns {
			fmt.Fprintf(&text, "alias %s m%d\n", p, i)
			if ok, err := path.Match(canonicalPattern(p), canonicalPattern(s)); ok && err == nil {
				want = append(want, fmt.Sprint("m", i))
			}
		}
		if d := cmp.Diff(want, parseAliases(text.String()).match(s)); d != "" {
			t.Fatalf("(-scan +index):\n%s", d)
		}
	})
}

func FuzzParseAndMatch(f *testing.F) {
	f.Add(sampleAliases, "pci:v00001AF4d00001000sv00001AF4sd00000001bc02sc00i00")
	f.Add("alias [ x\nalias [! y\nalias \\ z\nalias  \nalias", "[")
	f.Fuzz(func(t *testing.T, text, modalias string) {
		parseAliases(text).match(modalias)
	})
}

// 15,000 patterns, as in a generic kernel, and the 400 devices of a server.
func BenchmarkColdplugMatch(b *testing.B) {
	var text strings.Builder
	for i := range 9000 {
		fmt.Fprintf(&text, "alias pci:v%08Xd%08Xsv*sd*bc*sc*i* m%d\n", i%50, i, i/10)
	}
	for i := range 5000 {
		fmt.Fprintf(&text, "alias usb:v%04Xp%04Xd*dc*dsc*dp*ic*isc*ip*in* u%d\n", i%100, i, i/10)
	}
	for i := range 600 {
		fmt.Fprintf(&text, "alias acpi*:PNP%04X:* a%d\n", i, i)
		fmt.Fprintf(&text, "alias dmi*:svnVendor%d:* d%d\n", i, i)
	}
	var devices []string
	for i := range 400 {
		devices = append(devices, fmt.Sprintf("pci:v%08Xd%08Xsv00001AF4sd00000001bc02sc00i00", i%50, i*7))
	}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			parseAliases(text.String())
		}
	})
	a := parseAliases(text.String())
	b.Run("match", func(b *testing.B) {
		for b.Loop() {
			for _, d := range devices {
				a.match(d)
			}
		}
	})
}
