package controlplane

import (
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/render"
)

// defaultFiles are the configuration files of kube-apiserver, unless the
// configuration replaces them.
//
//go:embed files
var defaultFiles embed.FS

const (
	admissionFile      = "admission.yaml"
	auditFile          = "audit-policy.yaml"
	authenticationFile = "authentication.yaml"
)

var authenticationFiles = render.Parse(defaultFiles, "files/"+apiServer+"/"+authenticationFile)

// maxAuthority bounds the certificates of the authority of an OpenID issuer.
const maxAuthority = 1 << 20

// authentication is the AuthenticationConfiguration, with what the arguments say that withoutAuthentication leaves
// out. If the certificates of the OpenID issuer can't be read, it is without the issuer, and there is an error, too.
func authentication(c *config.APIServer) ([]byte, error) {
	args, ca, unread := c.ExtraArgs, "", error(nil)
	if name := args.Get("oidc-ca-file"); name != "" {
		host, _ := config.HostPath(c.ExtraVolumes, name)
		text, err := untrusted.ReadFile(host, maxAuthority)
		if ca = string(text); err != nil {
			args, unread = nil, fmt.Errorf("tokens of the OpenID issuer aren't accepted: oidc-ca-file of cluster.apiServer.extraArgs: %w", err)
		}
	}
	anonymous, _ := strconv.ParseBool(c.ExtraArgs.Get("anonymous-auth"))
	issuer, claim, prefix := args.Get("oidc-issuer-url"), cmp.Or(args.Get("oidc-username-claim"), "sub"), args.Get("oidc-username-prefix")
	switch {
	case prefix == "-":
		prefix = ""
	case prefix == "" && claim != "email":
		prefix = issuer + "#"
	}
	required := func(text string) object {
		claim, value, _ := strings.Cut(text, "=")
		return object{"claim": claim, "requiredValue": value}
	}
	var own object
	if err := authenticationFiles.YAML(authenticationFile, object{
		"Anonymous": anonymous, "CA": ca, "Issuer": issuer, "Client": args.Get("oidc-client-id"), "Rules": lists.Of(args["oidc-required-claim"], required),
		"Claim": claim, "Prefix": prefix, "Groups": args.Get("oidc-groups-claim"), "GroupsPrefix": args.Get("oidc-groups-prefix"),
	}, &own); err != nil {
		return nil, err
	}
	data, err := yaml.Marshal(own)
	return data, cmp.Or(err, unread)
}

// withoutAuthentication are the arguments without those that the AuthenticationConfiguration has, unless the user has
// another one.
func withoutAuthentication(args config.Args) config.Args {
	all := args
	args = config.Args{}
	maps.Copy(args, all)
	if args.Get("authentication-config") == "" {
		maps.DeleteFunc(args, func(flag string, _ config.Values) bool {
			return flag == "authentication-config" || flag == "anonymous-auth" || strings.HasPrefix(flag, "oidc-")
		})
	}
	return args
}

// apiServerFiles are the configuration files of kube-apiserver without secrets, by name. Files together with an error
// are good, but lack what couldn't be read.
func apiServerFiles(c *config.APIServer) (map[string][]byte, error) {
	files, err, unread := map[string][]byte{}, error(nil), error(nil)
	for _, name := range []string{admissionFile, auditFile} {
		if files[name], err = defaultFiles.ReadFile("files/" + apiServer + "/" + name); err != nil {
			return nil, err
		}
	}
	if files[authenticationFile], unread = authentication(c); files[authenticationFile] == nil {
		return nil, fmt.Errorf("render %s: %w", authenticationFile, unread)
	}
	if c.AuditPolicy != "" {
		if files[auditFile], err = yaml.Marshal(c.AuditPolicy); err != nil {
			return nil, fmt.Errorf("render %s: %w", auditFile, err)
		}
	}
	if len(c.AdmissionControl) > 0 {
		if files[admissionFile], err = withPlugins(files[admissionFile], c.AdmissionControl); err != nil {
			return nil, fmt.Errorf("render %s: %w", admissionFile, err)
		}
	}
	return files, unread
}

// withPlugins is the file with the user's plugins, which replace those of the
// same name.
func withPlugins(file []byte, plugins []config.AdmissionPlugin) ([]byte, error) {
	var admission struct {
		APIVersion string   `yaml:"apiVersion"`
		Kind       string   `yaml:"kind"`
		Plugins    []object `yaml:"plugins"`
	}
	if err := yaml.Unmarshal(file, &admission); err != nil {
		return nil, err
	}
	for _, p := range plugins {
		admission.Plugins = slices.DeleteFunc(admission.Plugins, func(had object) bool { return had["name"] == p.Name })
		admission.Plugins = append(admission.Plugins, object{"name": p.Name, "configuration": p.Configuration})
	}
	return yaml.Marshal(admission)
}

// filesVersion is a hash of the files: kube-apiserver reads them only at its start.
func filesVersion(files map[string][]byte) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s %d\n", name, len(files[name]))
		h.Write(files[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
