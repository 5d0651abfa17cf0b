package netboot

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/garboard-os/garboard/image/media"
)

// Vendor classes (RFC 4578, 3, and UEFI 2.10, 24.7.2.2).
const (
	pxeClass  = "PXEClient"
	httpClass = "HTTPClient"
)

// A firmware is what looks for a boot file.
type firmware struct {
	name, class string
	file        string
	url         bool // it takes a URL
}

// firmwares are those for which there is a boot file, by what option 93 says
// (https://www.iana.org/assignments/dhcpv6-parameters, "Processor Architecture Types").
var firmwares = map[iana.Arch]firmware{
	iana.INTEL_X86PC: {name: "BIOS", class: pxeClass, file: media.IPXEFile},
	iana.EFI_X86_64:  {name: "UEFI", class: pxeClass, file: media.UKIFile},
	// in fact x86-64, since an erratum of RFC 4578
	iana.EFI_BC:          {name: "UEFI", class: pxeClass, file: media.UKIFile},
	iana.EFI_X86_64_HTTP: {name: "UEFI HTTP boot", class: httpClass, file: media.UKIFile, url: true},
}

// ipxeClass is the user class of iPXE. It takes a script.
const ipxeClass = "iPXE"

// discoveryControl is option 43 with PXE_DISCOVERY_CONTROL: load the boot file at once, without a menu and another
// question (PXE 2.1, table 2-1).
var discoveryControl = []byte{6, 1, 1 << 3, 255}

// serveDHCP answers until c is closed. again is for the port of the boot server.
func (s *Server) serveDHCP(c net.PacketConn, again bool) error {
	packet := make([]byte, 64<<10)
	for {
		n, peer, err := c.ReadFrom(packet)
		if err != nil {
			return err
		}
		question, err := dhcpv4.FromBytes(packet[:n])
		if err != nil {
			continue // not DHCP
		}
		answer, err := s.answer(question, again)
		if err == nil && answer != nil {
			_, err = c.WriteTo(answer.ToBytes(), destination(question, peer))
		}
		if err != nil {
			s.report.line(question.ClientHWAddr.String(), "gets no boot file: %v", err)
		}
	}
}

// destination is where the answer to a question goes (RFC 2131, 4.1). A machine without an address gets a broadcast.
func destination(q *dhcpv4.DHCPv4, peer net.Addr) net.Addr {
	from, known := peer.(*net.UDPAddr)
	switch {
	case !q.GatewayIPAddr.IsUnspecified():
		return &net.UDPAddr{IP: q.GatewayIPAddr, Port: dhcpv4.ServerPort}
	case known && !from.IP.IsUnspecified() && !q.ClientIPAddr.IsUnspecified():
		return from
	}
	return &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpv4.ClientPort}
}

// answer is nil for those who don't ask for a boot file.
func (s *Server) answer(q *dhcpv4.DHCPv4, again bool) (*dhcpv4.DHCPv4, error) {
	class, _, _ := strings.Cut(q.ClassIdentifier(), ":")
	if q.OpCode != dhcpv4.OpcodeBootRequest || class != pxeClass && class != httpClass {
		return nil, nil
	}
	kind := dhcpv4.MessageTypeOffer
	switch t := q.MessageType(); {
	case t == dhcpv4.MessageTypeDiscover && !again:
	case (t == dhcpv4.MessageTypeRequest || t == dhcpv4.MessageTypeInform) && again:
		kind = dhcpv4.MessageTypeAck
	default:
		s.machines.learn(q) // a request to the DHCP server has the address that the machine will have
		return nil, nil
	}
	isNew := s.machines.learn(q)
	arch := architecture(q)
	f, known := firmwares[arch]
	if !known || f.class != class {
		if isNew {
			s.report.line(q.ClientHWAddr.String(), "gets no answer: Garboard has no boot file for a firmware of the type %s (%d)", arch, arch)
		}
		return nil, nil
	}
	if slices.Contains(q.UserClass(), ipxeClass) {
		f.name, f.file, f.url = f.name+" with iPXE", media.ScriptFile, true
	}
	if isNew {
		s.report.line(q.ClientHWAddr.String(), "(%s, UUID %s) asks for a boot file: %s", f.name, cmp.Or(machineUUID(q), "unknown"), f.file)
	}
	return s.bootReply(q, kind, f)
}

// bootReply names a boot file. The header has it, because the firmware of some network cards reads options 66 and 67
// wrong; only a URL is in option 67, too.
func (s *Server) bootReply(q *dhcpv4.DHCPv4, kind dhcpv4.MessageType, f firmware) (*dhcpv4.DHCPv4, error) {
	own := net.IP(s.o.On.Address.AsSlice())
	with := []dhcpv4.Modifier{
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithServerIP(own),
		dhcpv4.WithClientIP(q.ClientIPAddr),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(own)),
		dhcpv4.WithOption(dhcpv4.OptClassIdentifier(f.class)),
		dhcpv4.WithOptionCopied(q, dhcpv4.OptionClientMachineIdentifier),
	}
	name := f.file
	if f.url {
		name = s.url(f.file)
		with = append(with, dhcpv4.WithOption(dhcpv4.OptBootFileName(name)))
	}
	// UEFI must not get it: some of them ignore such an offer, and without it they ask the boot server.
	if f.name == firmwares[iana.INTEL_X86PC].name {
		with = append(with, dhcpv4.WithGeneric(dhcpv4.OptionVendorSpecificInformation, discoveryControl))
	}
	reply, err := dhcpv4.NewReplyFromRequest(q, with...)
	if err != nil {
		return nil, err
	}
	reply.ServerHostName, reply.BootFileName = s.o.On.Address.String(), name
	return reply, nil
}

// architecture is what option 93 says, or else the vendor class: PXEClient:Arch:xxxxx:UNDI:yyyzzz (RFC 4578, 3).
// Without both, it is a BIOS.
func architecture(q *dhcpv4.DHCPv4) iana.Arch {
	if all := q.ClientArch(); len(all) > 0 {
		return all[0]
	}
	var arch iana.Arch
	if _, rest, found := strings.Cut(q.ClassIdentifier(), ":Arch:"); found {
		_, _ = fmt.Sscanf(rest, "%d", &arch)
	}
	return arch
}
