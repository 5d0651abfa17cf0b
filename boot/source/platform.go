package source

import (
	"context"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// linkLocal is where the metadata services of clouds are.
const linkLocal = "http://169.254.169.254"

// A metadata is how a platform gives a machine its user data, which is the machine configuration, and its network.
type metadata struct {
	path, network string // network: "" for DHCP
	header        http.Header
	// token is the path that a token for further requests is put to; "": there is none.
	token string
	// encoded: the user data is in base64.
	encoded bool
}

// Platforms with a metadata service:
//
//   - https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
//   - https://cloud.google.com/compute/docs/metadata/querying-metadata
//   - https://learn.microsoft.com/azure/virtual-machines/user-data
//   - https://docs.hetzner.cloud/reference/cloud#server-metadata
var metadataServices = map[string]metadata{
	"aws":    {path: "/latest/user-data", token: "/latest/api/token"},
	"gcp":    {path: "/computeMetadata/v1/instance/attributes/user-data", header: http.Header{"Metadata-Flavor": {"Google"}}},
	"azure":  {path: "/metadata/instance/compute/userData?api-version=2021-01-01&format=text", header: http.Header{"Metadata": {"true"}}, encoded: true},
	"hcloud": {path: "/hetzner/v1/userdata", network: "/hetzner/v1/metadata/network-config"},
}

// Platforms without one.
const (
	platformMetal   = "metal"
	platformNoCloud = "nocloud"
	platformVMware  = "vmware"
)

const (
	awsTTL, awsToken = "X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "X-Aws-Ec2-Metadata-Token"
	// tokenSeconds is how long the token is needed.
	tokenSeconds = "300"
)

// What platforms have, as files of a volume, and as properties.
const (
	userData      = "user-data"
	networkConfig = "network-config"
)

// PlatformNetwork reads the network that garboard.platform= has for the machine. The error is boot.ErrNone if it has
// none.
func PlatformNetwork(ctx context.Context, o Options) ([]byte, error) {
	platform, _ := o.Cmdline.Get(boot.ParamPlatform)
	if o.Mode == boot.Container || platform == "" || platform == platformMetal {
		return nil, none("no platform")
	}
	data, err := o.withDefaults().readPlatform(ctx, platform, networkConfig)
	if errors.Is(err, errNotThere) {
		err = none(err.Error())
	}
	return data, err
}

// readPlatform reads the user data or the network from what garboard.platform= names.
func (o Options) readPlatform(ctx context.Context, platform, what string) ([]byte, error) {
	service, known := metadataServices[platform]
	switch {
	case platform == platformNoCloud:
		return o.readNoCloud(ctx, what)
	case platform == platformVMware:
		return o.readOVF(ctx, what)
	case known && what == networkConfig && service.network == "":
		return nil, none("its network is DHCP")
	case known && what == networkConfig:
		return fetch(ctx, o.HTTP, o.Wait, request{url: o.Metadata + service.network})
	case !known:
		return nil, fmt.Errorf("%s=%s: must be one of %s", boot.ParamPlatform, platform,
			strings.Join(append([]string{platformMetal, platformNoCloud, platformVMware}, slices.Sorted(maps.Keys(metadataServices))...), ", "))
	}
	header := maps.Clone(service.header)
	if service.token != "" {
		token, err := fetch(ctx, o.HTTP, o.Wait, request{method: http.MethodPut, url: o.Metadata + service.token, header: http.Header{awsTTL: {tokenSeconds}}})
		if err != nil {
			return nil, err
		}
		header = http.Header{awsToken: {string(token)}}
	}
	data, err := fetch(ctx, o.HTTP, o.Wait, request{url: o.Metadata + service.path, header: header})
	if errors.Is(err, errNotThere) || err == nil && len(data) == 0 {
		return nil, none("the machine has no user data")
	}
	if err == nil && service.encoded {
		if data, err = base64.StdEncoding.DecodeString(string(data)); err != nil {
			err = errors.New("the user data isn't base64")
		}
	}
	return data, err
}

// noCloudLabels are those of the volume of NoCloud
// (https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html).
var noCloudLabels = []string{"cidata", "CIDATA"}

const noCloudArgument = "ds"

// noCloudSeed is a kernel argument, or the machine's serial number, that names a URL.
var noCloudSeed = regexp.MustCompile(`^ds=nocloud(?:-net)?;s=(\S+)$`)

// readNoCloud reads a file from a volume, or from the URL in a kernel argument or in the machine's
// serial number.
func (o Options) readNoCloud(ctx context.Context, file string) (data []byte, err error) {
	for _, label := range noCloudLabels {
		err = o.Mount(ctx, label, func(files fs.FS) error {
			text, err := readFile(files, file)
			if err == nil {
				data = text // of the only volume that has it
			}
			return err
		})
		if !errors.Is(err, boot.ErrNone) {
			return data, err
		}
	}
	argument, _ := o.Cmdline.Get(noCloudArgument)
	serial, _ := o.readText(productSerial) // a machine may have none
	for _, text := range []string{noCloudArgument + "=" + argument, serial} {
		if m := noCloudSeed.FindStringSubmatch(text); m != nil {
			return fetch(ctx, o.HTTP, o.Wait, request{url: strings.TrimSuffix(m[1], "/") + "/" + file})
		}
	}
	return nil, none(fmt.Sprintf("no volume %s with %s, and no kernel argument or serial number ds=nocloud;s=URL", noCloudLabels[0], file))
}

// A hypervisor attaches the properties of a virtual machine as a CD with one XML document (DSP0243, "Open
// Virtualization Format Specification", 11.2 and 11.3).
const (
	ovfLabel = "OVF ENV"
	ovfFile  = "ovf-env.xml"
)

// readOVF reads a property, which is in base64.
func (o Options) readOVF(ctx context.Context, property string) (data []byte, err error) {
	err = o.Mount(ctx, ovfLabel, func(files fs.FS) error {
		text, err := readFile(files, ovfFile)
		if err != nil {
			return err
		}
		var environment struct {
			Properties []struct {
				Key   string `xml:"key,attr"`
				Value string `xml:"value,attr"`
			} `xml:"PropertySection>Property"`
		}
		if err := xml.Unmarshal(text, &environment); err != nil {
			return fmt.Errorf("%s: %w", ovfFile, err)
		}
		for _, p := range environment.Properties {
			if p.Key != property || p.Value == "" {
				continue
			}
			if data, err = base64.StdEncoding.DecodeString(p.Value); err != nil {
				return fmt.Errorf("%s: the property %s isn't base64", ovfFile, property)
			}
			return nil
		}
		return none("no property " + property + " in " + ovfFile)
	})
	return data, err
}
