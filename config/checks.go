package config

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

// check looks at one subject of a Config with its defaults filled in. A check
// must not depend on an earlier one having passed.
type check struct {
	name string
	run  func(*Config, *report)
}

// checks refuse a configuration that can't work. All of them run, in this
// order, whatever the others find.
var checks = []check{
	{"version is known", checkVersion},
	{"identity is there", checkIdentity},
	{"tokens are well-formed", checkTokens},
	{"authorities are whole", checkAuthorities},
	{"accepted authorities are distinct", checkAccepted},
	{"endpoint is reachable by name and port", checkEndpoint},
	{"hostname is valid", checkHostname},
	{"resolver asks servers", checkResolver},
	{"interfaces are consistent", checkInterfaces},
	{"bonds are consistent", checkBonds},
	{"VLANs are consistent", checkVLANs},
	{"links have what they are made of", checkStack},
	{"settings of drivers are possible", checkEthernet},
	{"addresses and gateways are those of hosts", checkAddresses},
	{"rules are consistent", checkRules},
	{"shared address is possible", checkVIP},
	{"WireGuard is consistent", checkWireGuard},
	{"firewall lets its operator in", checkFirewall},
	{"time servers are named", checkTime},
	{"install disk is a device", checkInstall},
	{"data disks are distinct", checkDisks},
	{"images have a version", checkImages},
	{"arguments are flags", checkArgs},
	{"node labels may be set by a kubelet", checkNodeLabels},
	{"node taints have names", checkNodeTaints},
	{"registries are reachable", checkRegistries},
	{"signatures can be verified", checkImageRules},
	{"files are distinct", checkFiles},
	{"environment and sysctls are well-formed", checkEnv},
	{"udev rules can be applied", checkUdevRules},
	{"kernel modules have names", checkKernelModules},
	{"encryption keys are usable", checkEncryption},
	{"logs have destinations", checkLogging},
	{"metrics have an address", checkMetrics},
	{"certificate names are valid", checkSANs},
	{"subnets fit", checkSubnets},
	{"address families fit", checkFamilies},
	{"CNI is chosen once", checkCNI},
	{"volumes are absolute", checkVolumes},
	{"audit policy is one", checkAudit},
	{"admission plugins are named", checkAdmission},
	{"manifests are named", checkManifests},
}

func checkVersion(c *Config, r *report) {
	switch c.Version {
	case "":
		r.lacks(at("version"), "this release reads "+Version)
	case Version:
	default:
		r.bad(at("version"), "%s is not known; this release reads %s", quote(c.Version), Version)
	}
}

func checkIdentity(c *Config, r *report) {
	if c.Machine.Type == "" {
		r.lacks(at("machine", "type"), "init, controlplane or worker")
	}
	if c.Cluster.ControlPlane.Endpoint == (URL{}) {
		r.lacks(at("cluster", "controlPlane", "endpoint"), "the URL of the Kubernetes API")
	}
	if key := string(c.Cluster.Secret); key != "" && !isKey32(key) {
		r.bad(at("cluster", "secret"), "must be base64 of 32 bytes")
	}
	if !dnsName.MatchString(c.Cluster.Name) {
		r.bad(at("cluster", "clusterName"), "%s must be of lower-case letters, digits, dashes and dots", quote(c.Cluster.Name))
	}
	if port := c.Cluster.ControlPlane.LocalAPIServerPort; port < 1 || port > maxPort {
		r.bad(at("cluster", "controlPlane", "localAPIServerPort"), "%d is not a port (1 to %d)", port, maxPort)
	}
}

// maxPort is the largest TCP and UDP port.
const maxPort = 1<<16 - 1

// keyBytes is the length of WireGuard's and of our own symmetric keys.
const keyBytes = 32

func isKey32(text string) bool {
	data, err := base64.StdEncoding.DecodeString(text)
	return err == nil && len(data) == keyBytes
}

// bootstrapToken is Kubernetes' form of bootstrap tokens.
var bootstrapToken = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)

func checkTokens(c *Config, r *report) {
	for _, t := range []struct {
		where place
		token Secret
	}{{at("machine", "token"), c.Machine.Token}, {at("cluster", "token"), c.Cluster.Token}} {
		switch {
		case t.token == "":
			r.lacks(t.where, "")
		case !IsToken(string(t.token)):
			r.bad(t.where, "must be six characters, a dot and sixteen characters, all of a-z and 0-9")
		}
	}
}

func checkAuthorities(c *Config, r *report) {
	control, older := c.Machine.Type.ControlPlane(), c.SelfHosted()
	for _, a := range []struct {
		where    place
		pair     CertKey
		required bool // the certificate: workers need some of them, too
	}{
		{at("machine", "ca"), c.Machine.CA, true},
		{at("cluster", "ca"), c.Cluster.CA, true},
		{at("cluster", "aggregatorCA"), c.Cluster.AggregatorCA, control && !older},
		{at("cluster", "etcd", "ca"), c.Cluster.Etcd.CA, control},
	} {
		if len(a.pair.Crt) == 0 {
			if a.required {
				r.lacks(a.where.with("crt"), "")
			}
			continue
		}
		if len(a.pair.Key) == 0 && control {
			r.lacks(a.where.with("key"), "a control plane issues certificates")
		}
		if _, _, err := a.pair.CA().Parse(); err != nil {
			r.bad(a.where, "%v", err)
		}
	}
	switch key := c.Cluster.ServiceAccount.Key; {
	case len(key) > 0:
		if _, err := pki.ParseKey(key); err != nil {
			r.bad(at("cluster", "serviceAccount", "key"), "%v", err)
		}
	case control && !older:
		r.lacks(at("cluster", "serviceAccount", "key"), "a control plane signs service account tokens")
	}
}

// maxAccepted bounds each list of authorities: a rotation needs one.
const maxAccepted = 8

func checkAccepted(c *Config, r *report) {
	for _, a := range Authorities {
		issuing, accepted := a.Of(c)
		seen, where := []PEM{issuing.Crt}, at()
		for _, name := range a.Accepted {
			where = where.with(name)
		}
		if len(*accepted) > maxAccepted {
			r.bad(where, "has %d authorities; at most %d are accepted", len(*accepted), maxAccepted)
		}
		for i, pair := range *accepted {
			switch _, _, err := pair.CA().Parse(); {
			case len(pair.Crt) == 0:
				r.lacks(where.with(i, "crt"), "")
			case err != nil:
				r.bad(where.with(i), "%v", err)
			case slices.ContainsFunc(seen, func(p PEM) bool { return bytes.Equal(p, pair.Crt) }):
				r.bad(where.with(i), "is there twice: in this list, or as the authority that issues")
			}
			seen = append(seen, pair.Crt)
		}
	}
	keys := c.Cluster.ServiceAccount.AcceptedKeys
	if where := at("cluster", "serviceAccount", "acceptedKeys"); len(keys) > maxAccepted {
		r.bad(where, "has %d keys; at most %d are accepted", len(keys), maxAccepted)
	}
	seen := []PEM{}
	for i, key := range append([]KeyPEM{c.Cluster.ServiceAccount.Key}, keys...) {
		public, err := pki.EncodePublicKey(key)
		where := at("cluster", "serviceAccount", "acceptedKeys", i-1)
		switch {
		case i == 0: // checkAuthorities looks at it
		case err != nil:
			r.bad(where, "%v", err)
		case slices.ContainsFunc(seen, func(p PEM) bool { return bytes.Equal(p, public) }):
			r.bad(where, "is there twice: in this list, or as the key that signs")
		}
		seen = append(seen, public)
	}
	secrets := c.Cluster.AcceptedSecrets
	for i, key := range secrets {
		if !isKey32(string(key)) || c.Cluster.Secret == "" || key == c.Cluster.Secret || slices.Contains(secrets[:i], key) || i == maxAccepted {
			r.bad(at("cluster", "acceptedSecrets", i), "must be base64 of 32 bytes, one of at most %d beside cluster.secret, and in no other place", maxAccepted)
			break
		}
	}
}

func checkEndpoint(c *Config, r *report) {
	where, u := at("cluster", "controlPlane", "endpoint"), c.Cluster.ControlPlane.Endpoint
	if u == (URL{}) {
		return
	}
	switch {
	case u.Scheme != "https":
		r.bad(where, "must be https, not %s", quote(u.Scheme))
	case lacksColon(r, where, u.Hostname()):
	case u.Port() == "":
		r.bad(where, "lacks the port; did you mean https://%s:%d", u.Host, DefaultAPIServerPort)
	case strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil:
		r.bad(where, "must be a scheme, a host and a port only; did you mean https://%s", u.Host)
	}
	checkHost(r, where, u.Hostname())
}

func checkTime(c *Config, r *report) {
	for i, server := range c.Machine.Time.Servers {
		checkHost(r, at("machine", "time", "servers", i), server)
	}
}

func checkInstall(c *Config, r *report) {
	checkDevice(r, at("machine", "install", "disk"), c.Machine.Install.Disk)
	for i, key := range c.Machine.Install.Keys {
		if _, err := pki.ReleaseKey(key); err != nil {
			r.bad(at("machine", "install", "keys", i), "%v: must be the line of base64 in a file of 'gbctl gen release-key', NAME.pub", err)
		}
	}
	for i, arg := range c.Machine.Install.ExtraKernelArgs {
		where := at("machine", "install", "extraKernelArgs", i)
		if err := KernelArg(arg); err != nil {
			r.bad(where, "%v", err)
		} else if len(arg) > maxKernelArg {
			r.bad(where, "%s has %d characters, of at most %d", quote(arg), len(arg), maxKernelArg)
		}
	}
}

// KernelArg says why a text isn't one argument of the kernel that means the same to each boot loader.
func KernelArg(arg string) error {
	switch {
	case arg == "" || strings.ContainsFunc(arg, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' }):
		return fmt.Errorf("%s is not one kernel argument of printable characters, without blanks and quotes, such as console=ttyS1", quote(arg))
	case strings.HasPrefix(arg, "garboard.slot="):
		return errors.New("garboard.slot is set by the boot loader")
	}
	return nil
}

func checkDevice(r *report, where place, device string) {
	if device != "" && (!strings.HasPrefix(device, "/dev/") || path.Clean(device) != device) {
		r.bad(where, "%s is not a device below /dev, such as /dev/sda", quote(device))
	}
}

// maxKernelArg bounds one kernel argument. The whole command line has at most 2048 bytes (COMMAND_LINE_SIZE on x86).
const maxKernelArg = 256

// imageReference is looser than the specification: it finds typing errors, and
// the registry decides the rest. The tag or digest is required, because a node
// that restarts must run the same image as before.
var imageReference = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[a-zA-Z0-9_][a-zA-Z0-9._-]*)?(@sha256:[a-f0-9]{64})?$`)

// program is what the configuration has about a program that the node runs.
type program struct {
	where      place
	image      string
	args       Args // in extraArgs
	volumesKey string
	volumes    []Volume
}

func (c *Config) programs() []program {
	k, own, manager := &c.Cluster, &c.Machine.Kubelet, &c.Cluster.ControllerManager
	return []program{
		{where: at("machine", "install"), image: c.Machine.Install.Image},
		{at("machine", "kubelet"), own.Image, own.ExtraArgs, "extraMounts", own.ExtraMounts},
		{where: at("cluster", "etcd"), image: k.Etcd.Image, args: k.Etcd.ExtraArgs},
		{at("cluster", "apiServer"), k.APIServer.Image, k.APIServer.ExtraArgs, "extraVolumes", k.APIServer.ExtraVolumes},
		{at("cluster", "controllerManager"), manager.Image, manager.ExtraArgs, "extraVolumes", manager.ExtraVolumes},
		{at("cluster", "scheduler"), k.Scheduler.Image, k.Scheduler.ExtraArgs, "extraVolumes", k.Scheduler.ExtraVolumes},
		{where: at("cluster", "proxy"), image: k.Proxy.Image, args: k.Proxy.ExtraArgs},
		{where: at("cluster", "coreDNS"), image: k.CoreDNS.Image},
		{where: at("cluster", "network", "cni", "flannel"), image: k.Network.CNI.Flannel.Image},
		{where: at("cluster", "network", "policyAgent"), image: k.Network.PolicyAgent.Image},
	}
}

func checkImages(c *Config, r *report) {
	for _, p := range c.programs() {
		if p.image == "" {
			continue
		}
		if err := CheckImage(p.image); err != nil {
			r.bad(p.where.with("image"), "%s", err)
		}
	}
}

// CheckImage refuses what is no reference of an image, and one that names no version.
func CheckImage(image string) error {
	switch {
	case !imageReference.MatchString(image):
		return fmt.Errorf("%s is not an image reference, such as registry.k8s.io/pause:%s", quote(image), PauseVersion)
	case !strings.Contains(image[strings.LastIndexByte(image, '/')+1:], ":"):
		return fmt.Errorf("%s lacks a tag or a digest", quote(image))
	}
	return nil
}

func checkVolumes(c *Config, r *report) {
	for _, p := range c.programs() {
		seen := map[string]bool{}
		for i, volume := range p.volumes {
			where := p.where.with(p.volumesKey, i)
			if seen[volume.MountPath] {
				r.bad(where.with("mountPath"), "%s is taken by an earlier entry", quote(volume.MountPath))
			}
			seen[volume.MountPath] = volume.MountPath != ""
			checkAbsolute(r, where.with("hostPath"), volume.HostPath)
			checkAbsolute(r, where.with("mountPath"), volume.MountPath)
		}
	}
}

// checkAbsolute requires an absolute path without "." or ".." and without doubled slashes.
func checkAbsolute(r *report, where place, name string) {
	switch {
	case name == "":
		r.lacks(where, "")
	case !path.IsAbs(name):
		r.bad(where, "%s is not an absolute path", quote(name))
	case path.Clean(name) != name:
		r.bad(where, "%s is not a clean path; did you mean %s", quote(name), path.Clean(name))
	}
}

func checkManifests(c *Config, r *report) {
	for i, u := range c.Cluster.ExtraManifests {
		checkDocument(r, at("cluster", "extraManifests", i), u)
	}
	seen := map[string]bool{}
	for i, m := range c.Cluster.InlineManifests {
		where := at("cluster", "inlineManifests", i)
		switch {
		case m.Name == "":
			r.lacks(where.with("name"), "")
		case seen[m.Name]:
			r.bad(where.with("name"), "%s names a second manifest", quote(m.Name))
		}
		seen[m.Name] = true
		if strings.TrimSpace(m.Contents) == "" {
			r.lacks(where.with("contents"), "")
		}
	}
}

// sumFragment is the SHA-256 of a document in its URL.
var sumFragment = regexp.MustCompile(`^(?i:sha256=[0-9a-f]{64})?$`)

func checkDocument(r *report, where place, u URL) {
	checkHTTP(r, where, u)
	if !sumFragment.MatchString(u.Fragment) {
		r.bad(where, "#%s isn't #sha256= and the 64 hexadecimal digits of the document's sum", u.Fragment)
	}
}

func checkHTTP(r *report, where place, u URL) {
	if u.Scheme != "http" && u.Scheme != "https" {
		r.bad(where, "must be http or https, not %s", quote(u.Scheme))
	}
	if numbers.MatchString(u.Hostname()) { // names with an underscore are common here
		checkHost(r, where, u.Hostname())
	}
}
